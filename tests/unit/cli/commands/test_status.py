import contextlib
import threading
import time
from dataclasses import fields, replace
from typing import Any

import pytest
from rich.console import Console as RichConsole

from rlmesh_ray.cli.commands import status
from rlmesh_ray.cli.commands.status import tables
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.main import main
from rlmesh_ray.server.observe.counters import EnvCounters
from rlmesh_ray.server.observe.endpoint_status import EndpointStatus, as_fields
from rlmesh_ray.server.observe.statistics import EnvStatistics, ModelStatistics, StatisticsPair
from tests.lane_counts import note_step
from tests.model_counts import model_statistics


class Query:
    """Stands for the query of the registry; Ctrl-C interrupts it unless ``events`` are noted."""

    events: list[object] | None = None

    def __call__(self, console: Console, joined: str) -> list[Any]:
        if self.events is None:
            raise KeyboardInterrupt
        self.events.append("query")
        return []


@pytest.fixture
def query(monkeypatch: pytest.MonkeyPatch) -> Query:
    query = Query()
    monkeypatch.setattr(status, "_query", query)
    return query


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch, query: Query) -> Console:
    """Console of a command whose registry query is interrupted by Ctrl-C."""
    monkeypatch.setattr(status, "joined_ray", lambda *_: contextlib.nullcontext(""))
    return Console(is_json=True)


def test_an_interrupted_query_is_no_success(console: Console) -> None:
    with pytest.raises(KeyboardInterrupt):
        status.status(console, status.StatusFlags())


def test_ctrl_c_ends_watching(console: Console) -> None:
    status.status(console, status.StatusFlags(watch=True))


def test_watching_continues_until_ctrl_c(
    console: Console, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    query.events = events = list[object]()
    sleep = time.sleep

    def pause(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            return sleep(seconds)  # of servers that earlier tests have started
        events.append(seconds)
        if events.count(seconds) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", pause)

    status.status(console, status.StatusFlags(watch=True))

    assert events == ["query", 3.0, "query", 3.0]


def test_without_ray_the_error_names_the_alternative(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As importlib finds nothing in the base install.
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    assert main(["status", "--ray-address", "127.0.0.1:1"]) == 1

    error = capsys.readouterr().err
    assert error.startswith("error: status needs ray, which the base install does not have: pip")
    assert error.endswith("use on each endpoint: rlmesh-ray inspect ADDRESS\n")
    assert main(["status", "--dashboard"]) == 0


def env(steps_ms: list[int], uptime_s: float) -> EnvStatistics:
    counts = EnvCounters()
    lanes = counts.open()
    for took_ms in steps_ms:
        note_step(lanes, took_ms * 1_000_000, 4, 0)
    return replace(counts.statistics(), uptime_s=uptime_s)


def model(num_predictions: int, rows: list[int], uptime_s: float) -> ModelStatistics:
    return model_statistics(
        rows,
        forward_ns=2_000_000,
        items=num_predictions,
        routes=1,
        policy_version=5,
        uptime_s=uptime_s,
    )


def endpoint(sighting: StatisticsPair | None = None, **changes: Any) -> EndpointStatus:
    plain = EndpointStatus(
        fleet="hills",
        endpoint_id="hills/0",
        node="192.0.2.1",
        address="192.0.2.1:5000",
        restarts=0,
        lease_left_s=12.0,
        is_retiring=False,
        num_assigned=2,
        sighting=sighting,
    )
    return replace(plain, **changes)


def text(*endpoints: EndpointStatus) -> str:
    console = RichConsole(width=160, markup=False)
    with console.capture() as capture:
        for table in tables(endpoints):
            console.print(table)
    return capture.get()


def test_rates_cover_the_time_between_two_heartbeats() -> None:
    sighting = StatisticsPair(env([1] * 40, 20.0), env([1] * 10, 17.0))

    fields = as_fields(endpoint(sighting))

    assert fields["steps_per_s"] == pytest.approx(10.0)
    assert fields["lane_steps_per_s"] == pytest.approx(40.0)


def test_quantiles_are_recent_or_else_of_the_whole_life() -> None:
    slow_then_quick = StatisticsPair(env([100] * 50 + [1] * 10, 20.0), env([100] * 50, 17.0))
    idle = StatisticsPair(env([100] * 50, 20.0), env([100] * 50, 17.0))

    assert as_fields(endpoint(slow_then_quick))["step_p99_s"] == pytest.approx(0.001, rel=0.1)
    assert as_fields(endpoint(idle))["step_p50_s"] == pytest.approx(0.075, rel=0.1)


def test_there_is_no_rate_before_the_second_heartbeat() -> None:
    fields = as_fields(endpoint(StatisticsPair(env([1], 3.0))))

    assert fields["lane_steps_per_s"] is None
    assert fields["steps"] == 1


def test_a_stale_endpoint_has_no_rate() -> None:
    sighting = StatisticsPair(env([1] * 40, 20.0), env([1] * 10, 17.0))

    fields = as_fields(endpoint(sighting, lease_left_s=-1.0))

    assert fields["lane_steps_per_s"] is None
    assert fields["steps"] == 40


def test_a_policy_has_statistics_of_its_batches() -> None:
    fields = as_fields(endpoint(StatisticsPair(model(30, [1, 3, 8], 9.0), model(24, [1], 6.0))))

    assert fields["service"] == "model"
    assert fields["predictions_per_s"] == pytest.approx(2.0)
    assert fields["rows_per_batch"] == pytest.approx(5.5)
    assert fields["policy_version"] == 5
    assert fields["queue_p50_s"] is None


def test_a_policy_says_how_it_runs_and_an_older_one_does_not() -> None:
    torch = replace(model(1, [1], 1.0), inference="torch", torch_reason="it has hooks")
    older: Any = object.__new__(ModelStatistics)
    # As unpickled here: an older version has no values for the last two fields.
    older.__setstate__([getattr(torch, each.name) for each in fields(torch)][:-2])

    shown, unknown = (as_fields(endpoint(StatisticsPair(each))) for each in (torch, older))

    assert (shown["inference"], shown["torch_reason"]) == ("torch", "it has hooks")
    assert (unknown["inference"], unknown["torch_reason"]) == (None, None)
    assert unknown["policy_version"] == 5


def test_fleets_have_tables_of_their_own_and_policies_come_last() -> None:
    shown = text(
        endpoint(StatisticsPair(model(1, [1], 1.0)), fleet="pilots", endpoint_id="pilots/0"),
        endpoint(StatisticsPair(env([1], 1.0))),
        endpoint(fleet="", endpoint_id="alone", num_assigned=0),
    )

    titles = [line.split(",")[0].strip() for line in shown.splitlines() if "fleet" in line]
    assert titles == ["without a fleet", "fleet hills", "fleet pilots"]
    assert "weights" in shown.split("fleet pilots")[1]
    assert "weights" not in shown.split("fleet pilots")[0]


def test_endpoints_are_sorted_by_id_with_numbers_in_order() -> None:
    ids = ["hills-10", "hills-2", "hills-1", "hills", "hill7-x", "a2b10", "a2b9", "7"]

    shown = text(*(endpoint(endpoint_id=each) for each in ids))

    first_words = [line.split()[0] for line in shown.splitlines() if line.strip()]
    in_order = ["7", "a2b9", "a2b10", "hill7-x", "hills", "hills-1", "hills-2", "hills-10"]
    assert [each for each in first_words if each in ids] == in_order


def test_a_gateway_is_shown_last_without_statistics() -> None:
    gateway = endpoint(
        fleet="gateway/model/pilots",
        endpoint_id="gateway/1",
        address="192.0.2.1:5555",
        num_assigned=0,
    )

    shown = text(gateway, endpoint(StatisticsPair(model(1, [1], 1.0)), fleet="model/pilots"))

    _, of_gateway = shown.split("gateways to model/pilots")
    assert "192.0.2.1:5555" in of_gateway
    assert "restarts" in of_gateway
    assert "steps" not in of_gateway
    assert as_fields(gateway)["service"] == "gateway"


def test_the_state_of_stale_and_retiring_endpoints_is_shown() -> None:
    shown = text(
        endpoint(lease_left_s=-34.2, endpoint_id="hills/1"),
        endpoint(is_retiring=True, endpoint_id="hills/2", restarts=3),
    )

    assert "stale for 34 s" in shown
    assert "retiring" in shown
    assert as_fields(endpoint(lease_left_s=-34.2))["state"] == "stale"


def test_only_counts_above_zero_are_shown_as_trouble() -> None:
    counts = EnvCounters()
    counts.sessions.lost += 1
    counts.sessions.errors["TIMEOUT"] += 1
    counts.worker_restarts += 1

    assert "lost 1, workers replaced 1, TIMEOUT 1" in text(
        endpoint(StatisticsPair(counts.statistics()))
    )
    assert "TIMEOUT" not in text(endpoint(StatisticsPair(env([1], 1.0))))


def test_a_node_is_shown_only_where_the_address_does_not_name_it() -> None:
    assert "node" not in text(endpoint())
    assert "outside of Ray" in text(endpoint(node="", address="far.example:1"))
    assert "10.0.0.7" in text(endpoint(node="10.0.0.7"))


def test_an_endpoint_without_statistics_is_shown() -> None:
    assert "hills/0" in text(endpoint())
    assert "- of 2" in text(endpoint())
