"""A cluster's life: it comes up, trains, loses a node in the middle of it, and goes.

On hosts made of namespaces, by `ray up` and the repository's own cluster.yaml; where these cannot
be made, on Ray's multi-node test cluster. The names of the tests say which it was, and for lack of
what.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import HOME, lacking
from tests.cluster.launched import LaunchedCluster
from tests.cluster.simulated import SimulatedCluster
from tests.cluster.training import BATCH

AnyCluster = LaunchedCluster | SimulatedCluster
LACKING = lacking()
WHERE = f"on-ray-s-test-cluster-for-lack-of-{LACKING}" if LACKING else "on-hosts"

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    # What Ray warns about is not ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Reports:
    """What ``training.py`` writes, as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._others: list[str] = []

    def next(self) -> dict[str, Any]:
        """Return the next report; there has to be one."""
        report = self._next()
        assert report is not None, "".join(self._others[-40:])
        return report

    def rest(self) -> list[dict[str, Any]]:
        """Return all reports until the training ends well."""
        reports = list(iter(self._next, None))
        assert self._process.wait() == 0, "".join(self._others[-40:])
        return reports

    def _next(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
            self._others.append(line)
        return None


@pytest.fixture(scope="module", params=[WHERE])
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnyCluster]:
    kind = SimulatedCluster if LACKING else LaunchedCluster
    made = kind(tmp_path_factory.mktemp("cluster"))
    try:
        made.up()
        yield made
    finally:
        made.clean_up()


def nodes(report: dict[str, Any]) -> list[str | None]:
    return [each and each["node_id"] for each in report["endpoints"]]


def hosts(report: dict[str, Any]) -> set[str]:
    return {each["address"].rpartition(":")[0] for each in report["endpoints"] if each}


def test_the_example_trains_on_a_cluster(cluster: AnyCluster) -> None:
    running = cluster.submit(
        Path("examples/train_on_fleet.py"),
        *("--endpoints", str(cluster.num_nodes), "--iterations", "2", "--batch", "512"),
    )

    output, _ = running.communicate()

    assert running.returncode == 0, output
    assert "iteration 2: mean return" in output
    assert "checkpoint: " in output


@pytest.mark.skipif(bool(LACKING), reason=f"needs hosts, for which {LACKING} is missing")
def test_every_host_has_the_project_and_none_answers_strangers(cluster: LaunchedCluster) -> None:
    imported_from = f"{HOME}/rlmesh-env/bin/python -c 'import rlmesh_ray as r; print(r.__file__)'"

    places = cluster.on_each_host("sh", "-c", imported_from)
    modes = cluster.on_each_host("stat", "-c", "%a", f"{HOME}/.ray/auth_token")
    answer = cluster.status_for_a_stranger()

    assert all(place.startswith(f"{HOME}/rlmesh-env/") for place in places)
    assert set(modes) == {"600"}
    assert "AuthenticationError" in answer


def test_training_goes_on_when_a_node_is_lost_and_uses_its_replacement(
    cluster: AnyCluster,
) -> None:
    endpoints = str(cluster.num_nodes)  # a CPU each: a lost one finds room on the replacement alone
    reports = Reports(
        cluster.submit(
            Path("tests/cluster/training.py"), "--endpoints", endpoints, "--within-s", "200"
        )
    )
    first = reports.next()
    reported = [reports.next()]

    cluster.lose_a_node()
    while None not in nodes(reported[-1]):
        reported.append(reports.next())
    lost = {was for was, now in zip(nodes(first), nodes(reported[-1]), strict=True) if now is None}
    without = [reports.next() for _ in range(5)]
    cluster.replace_it()
    reported += without + reports.rest()

    assert len(set(nodes(first))) == cluster.num_nodes
    if isinstance(cluster, LaunchedCluster):
        assert hosts(first) == cluster.addresses
    assert len(lost) == 1
    assert first["runner"] not in lost
    assert without[-1]["iteration"] == without[0]["iteration"] + 4
    assert all(report["gaps"] == 0 for report in reported)
    for report in reported:
        assert report["steps"] == report["reported_steps"] >= report["iteration"] * BATCH
    replacement = set(nodes(reported[-1])) - set(nodes(first))
    assert len(replacement) == 1
    assert len(set(nodes(reported[-1]))) == cluster.num_nodes
    assert all(each["num_sessions"] for each in reported[-1]["endpoints"])


def test_a_cluster_that_is_taken_down_leaves_no_process(cluster: AnyCluster) -> None:
    assert cluster.leftovers(within_s=0) != []

    cluster.down()

    assert cluster.leftovers(within_s=30) == []
