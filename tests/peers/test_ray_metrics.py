"""Ray's metrics carry what endpoints count, and all that the dashboard asks for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlmesh_ray.server import metrics
from rlmesh_ray.server.metrics import HistogramMetric, Metric

ROOT = Path(__file__).parents[2]
EXTRA = ROOT / ".venvs" / "ray_metrics"

pytestmark = pytest.mark.slow

NAMES = {
    metric.exported
    for each in vars(metrics).values()
    if isinstance(each, Metric | HistogramMetric)
    for metric in (each.metrics if isinstance(each, HistogramMetric) else (each,))
}
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

    assert env(metrics.ENV_STEPS.exported) == 5
    assert env(metrics.ENV_LANE_STEPS.exported) == 20
    assert env(metrics.ENV_EPISODES.exported) == 5
    assert env(metrics.ERRORS.exported, "TIMEOUT") == 1
    assert env(metrics.RESTARTS.exported) == 2


def test_a_histogram_has_its_empty_buckets_too(exported: Values) -> None:
    buckets = metrics.ENV_STEP_SECONDS.bucket.exported

    counts = [exported["seen/metered", buckets, le] for le in ("2e-05", "5e-05", "+Inf")]
    assert counts == [0, 5, 5]
    total = exported["seen/metered", metrics.ENV_STEP_SECONDS.total.exported, ""]
    assert total == pytest.approx(5 * 30e-6)


def test_what_a_policy_counts_stands_by_itself(exported: Values) -> None:
    assert exported["seen/metered-model", metrics.POLICY_VERSION.exported, ""] == 9
    assert exported["seen/metered-model", metrics.BATCH_ROWS.bucket.exported, "16"] == 1
    assert ("seen/metered-model", metrics.ENV_STEPS.exported, "") not in exported
