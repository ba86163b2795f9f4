"""Ray's metrics carry what endpoints count, and all that the dashboard asks for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlmesh_ray.server.observe.statistics import ALL_METRICS

ROOT = Path(__file__).parents[2]
EXTRA = ROOT / ".venvs" / "ray_metrics"

pytestmark = pytest.mark.slow

NAMES = {metric.exported for metric in ALL_METRICS}
Values = dict[tuple[str, str, str], float]


@pytest.fixture(scope="module")
def exported() -> Values:
    """What Ray exports, by endpoint, name and the metric's own label."""
    assert (EXTRA / "opencensus").exists(), (
        "run `make .venvs/ray_metrics/.ready` first (`make test-slow` does)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.peers.ray_metrics.exporting", *NAMES],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(EXTRA), "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=280,
        check=True,
    )
    [line] = [each for each in done.stdout.splitlines() if each.startswith("[")]
    return {
        (own["endpoint_id"], name, own.get("le") or own.get("code", "")): value
        for name, own, value in json.loads(line)
    }


def test_ray_exports_every_metric(exported: Values) -> None:
    assert {name for _, name, _ in exported} >= NAMES


def test_what_an_environment_counts_is_added_up(exported: Values) -> None:
    def env(name: str, label: str = "") -> float:
        return exported["seen/metered", name, label]

    assert env("rlmesh_ray_env_steps_total") == 5
    assert env("rlmesh_ray_env_lane_steps_total") == 20
    assert env("rlmesh_ray_env_episodes_total") == 5
    assert env("rlmesh_ray_errors_total", "TIMEOUT") == 1
    assert env("rlmesh_ray_restarts") == 2


def test_a_histogram_has_its_empty_buckets_too(exported: Values) -> None:
    buckets = "rlmesh_ray_env_step_seconds_bucket"

    counts = [exported["seen/metered", buckets, le] for le in ("2e-05", "5e-05", "+Inf")]
    assert counts == [0, 5, 5]
    total = exported["seen/metered", "rlmesh_ray_env_step_seconds_sum", ""]
    assert total == pytest.approx(5 * 30e-6)


def test_what_a_policy_counts_stands_by_itself(exported: Values) -> None:
    assert exported["seen/metered-model", "rlmesh_ray_policy_version", ""] == 9
    assert exported["seen/metered-model", "rlmesh_ray_batch_rows_bucket", "16"] == 1
    assert ("seen/metered-model", "rlmesh_ray_env_steps_total", "") not in exported
