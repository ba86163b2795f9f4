from collections.abc import Sequence

from benchmarks.findings import Finding
from benchmarks.processes import Reading
from benchmarks.robots.driver import DriverJob, Mode
from benchmarks.robots.measure import Client, measure_robots
from benchmarks.robots.plan import RobotsPlan, Row


def canned(client: Client, command: Sequence[str]) -> Reading:
    """Serve nothing: a simulator keeps most of its pace, clients get more with a delay."""
    if "benchmarks.robots.openpi_server" in command:
        answers_per_s = 50.0
    elif command:
        horizon, max_delay_s = command[3:5]
        answers_per_s = 360.0 if float(max_delay_s) else {"1": 200.0, "8": 48.0}[horizon]
    else:
        job = DriverJob.from_line(client("").line)
        answers_per_s = 50.0 if job.mode is Mode.SIMULATOR else 50.0 * job.rows
    return Reading(answers_per_s, (1,), (), 0.0, (0.1,), 0.0)


def findings(row: Row) -> dict[str, Finding]:
    (found,) = measure_robots(RobotsPlan([row], repetitions=2), lambda _: None, canned)
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
