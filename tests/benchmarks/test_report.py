import io
from dataclasses import replace

from rich.console import Console

from benchmarks.findings import Finding, Goal, Measurement
from benchmarks.report import caveats, cores, table
from benchmarks.serving.measure import LAG, TWO_CLIENTS
from benchmarks.statistics import Spread, percentiles

RATIO = Spread((0.5, 0.75, 0.8))
FINDING = Finding(
    "messages",
    "8 routes",
    "messages/s",
    {"rlmesh-ray": Spread((5000.0, 7500.0, 8000.0)), "noop": Spread((10000.0,) * 3)},
    {"/ noop": RATIO},
    Goal("/ noop >= 0.7", 0.7),
    RATIO,
)
QUIET = Measurement(
    workload="messages",
    case="8 routes",
    side="noop",
    repetition=0,
    value=10_000.0,
    unit="messages/s",
    latency_us=percentiles([500]),
    lag_us=None,
    server_cores=0.8,
    client_cores=(0.7,),
    other_cores=0.01,
)


def shown(renderable: object) -> str:
    text = io.StringIO()
    Console(file=text, width=200).print(renderable)
    return text.getvalue()


def test_a_row_has_medians_quartiles_the_ratio_and_the_goal() -> None:
    text = shown(table([FINDING]))

    for part in ("messages, messages/s", "7,500", "[6,250, 7,750]", "0.75", "[0.625, 0.775]"):
        assert part in text
    assert "✓ / noop >= 0.7" in text


def test_units_stand_at_their_rows_where_they_differ() -> None:
    text = shown(table([FINDING, replace(FINDING, case="p99", unit="us", comparisons={})]))

    assert "8 routes (messages/s)" in text
    assert "p99 (us)" in text


def test_a_goal_is_judged_by_the_median() -> None:
    slow = Spread((0.9, 0.6, 0.5))

    assert FINDING.is_met
    assert not replace(FINDING, judged=slow).is_met
    assert "✗" in shown(table([replace(FINDING, judged=slow)]))
    assert replace(FINDING, goal=None).is_met is None


def test_a_ceiling_is_met_from_below() -> None:
    goal = Goal("p99 < 5 ms", 5000, is_ceiling=True)

    assert goal.is_met(4999)
    assert not goal.is_met(5001)


def test_a_single_value_has_no_quartiles() -> None:
    once = replace(FINDING, sides={"rlmesh-ray": Spread((5000.0,))}, comparisons={})

    assert "5,000" in shown(table([once]))
    assert "[" not in shown(table([once]))


def test_processor_time_stands_below_a_rate() -> None:
    spread = Spread((5000.0,) * 3, (90.0, 120.0, 130.0), (45.0, 60.0, 65.0))
    costly = replace(FINDING, sides={"rlmesh-ray": spread})

    assert "120 us CPU" in shown(table([costly]))
    assert "server 60" in shown(table([costly]))
    assert "CPU" not in shown(table([FINDING]))


def test_busy_cores_are_those_of_server_clients_and_others() -> None:
    text = shown(cores([replace(QUIET, client_cores=(0.5, 0.25))]))

    assert [word for word in text.split() if word.startswith("0.")] == ["0.80", "0.75", "0.01"]


def test_a_quiet_machine_needs_no_caveat() -> None:
    assert caveats([FINDING], [QUIET]) == []


def test_other_programs_are_reported() -> None:
    (caveat,) = caveats([], [replace(QUIET, other_cores=0.6), replace(QUIET, other_cores=0.8)])

    assert "0.7 cores" in caveat
    assert "quiet machine" in caveat


def test_a_client_at_its_limit_is_reported() -> None:
    (caveat,) = caveats([], [replace(QUIET, client_cores=(0.3, 0.97))])

    assert "messages, 8 routes (noop)" in caveat


def test_a_client_that_slows_the_faster_noop_server_is_reported() -> None:
    one, two = Spread((10.0,)), Spread((13.0,))
    sides = {"1 client process": one, "2 client processes": two}
    fast = Finding("no-op server", "generator", "messages/s", sides, {TWO_CLIENTS: Spread((1.3,))})
    slow = replace(fast, sides={"1 client process": Spread((5.0,))}, comparisons={})

    (caveat,) = caveats([slow, fast], [])

    assert "1.30 times" in caveat
    assert "--client-processes 2" in caveat


def test_an_open_loop_that_was_late_itself_is_reported() -> None:
    late = Finding("latency", LAG, "us", {"rlmesh-ray": Spread((2500.0,))})

    (caveat,) = caveats([late], [])

    assert "2.5 ms" in caveat
