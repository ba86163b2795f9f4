from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.findings import Finding
from benchmarks.load import ClientJob
from benchmarks.processes import Reading
from benchmarks.robots import measure, thin_link
from benchmarks.robots.driver import DriverJob, Mode
from benchmarks.robots.plan import RobotsPlan, Row
from rlmesh_ray.errors import ConfigurationError


def reading(answers_per_s: float) -> Reading:
    return Reading(answers_per_s, (1,), (), 0.0, (0.1,), 0.0)


@pytest.fixture(autouse=True)
def _canned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve nothing: a simulator keeps most of its pace, clients get more with a delay."""

    def served(command: Sequence[str], client: Callable[[Any], ClientJob]) -> Reading:
        if "benchmarks.robots.openpi_server" in command:
            return reading(50.0)
        if "benchmarks.robots.cameras" in command:
            job = DriverJob.from_line(client(SimpleNamespace(address="198.18.0.2:1")).line)
            return reading({Mode.SMALL_IMAGES: 120.0, Mode.RAW_IMAGES: 6.0}[job.mode])
        horizon, max_delay_s = command[3:5]
        return reading(360.0 if float(max_delay_s) else {"1": 200.0, "8": 48.0}[horizon])

    def alone(servers: list[int], jobs: list[ClientJob]) -> Reading:
        assert not servers
        job = DriverJob.from_line(jobs[0].line)
        return reading(50.0 if job.mode is Mode.SIMULATOR else 50.0 * job.rows)

    link = SimpleNamespace(prefix=(), host="198.18.0.2")
    monkeypatch.setattr(measure, "ThinLink", lambda: nullcontext(link))
    monkeypatch.setattr(measure, "_served", served)
    monkeypatch.setattr(measure, "measure", alone)


def findings(row: Row) -> dict[str, Finding]:
    (found,) = measure.measure_robots(RobotsPlan([row], repetitions=2), lambda _: None)
    return {finding.case: finding for finding in found}


def test_a_simulator_is_judged_by_the_share_of_its_own_rate_with_prefetch() -> None:
    found = findings(Row.CHUNKS)

    assert found["chunks of 8, prefetch"].comparisons["/ simulator alone"].values == (0.96, 0.96)
    assert [each.is_met for each in found.values()] == [None, None, True]


def test_clients_are_judged_by_the_share_of_full_batches_with_a_delay() -> None:
    found = findings(Row.BATCHED)

    shares = [each.comparisons["/ policy alone"].median for each in found.values()]
    assert shares == [0.5, 0.9]
    assert [each.is_met for each in found.values()] == [None, True]


def test_openpi_clients_are_judged_without_a_delay_beside_a_server_without_batches() -> None:
    found = findings(Row.OPENPI)

    shares = [each.comparisons["/ one at a time"].median for each in found.values()]
    assert shares == [4.0, 7.2]
    assert [each.is_met for each in found.values()] == [True, None]


def test_small_images_are_judged_beside_raw_ones() -> None:
    (found,) = findings(Row.CAMERAS).values()

    assert found.comparisons["/ raw images"].values == (20.0, 20.0)
    assert found.is_met


def test_a_row_that_cannot_be_measured_here_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thin_link, "lacking", lambda: "root")

    with pytest.raises(ConfigurationError, match="a thin link needs root"):
        thin_link.ThinLink()
