"""The bench runs, says what it should, and has no number where there is none."""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from benchmarks import processes
from benchmarks.cli.commands import app
from benchmarks.load import Load
from benchmarks.processes import Process, Reading, Server, measure
from benchmarks.serving.frames import DIALECTS
from benchmarks.serving.plan import ClientKind
from benchmarks.serving.targets import client_command, installed_clients
from benchmarks.serving.turns import AskedServer, TurnsJob, ask_by_turns
from rlmesh_ray import ModelServer
from rlmesh_ray.cli.console import Console
from rlmesh_ray.errors import ConfigurationError, EndpointError, UnsupportedSpaceError
from rlmesh_ray.models.loading import CallablePolicy
from rlmesh_ray.spaces.contract import EnvContract

Capture = pytest.CaptureFixture[str]
TINY = ["--quick", "--seconds", "0.05", "--latency-seconds", "0.3"]


def bench(*arguments: str) -> int:
    console = Console(is_json="--json" in arguments)
    code: int = app([*arguments], prog_name="bench", standalone_mode=False, obj=console)
    return code


def load(server: ModelServer, **more: Any) -> Load:
    port = int(server.address.rpartition(":")[2])
    work: dict[str, Any] = {"routes": ("a", "b"), "rows": 2, "warm_up_s": 0.05, "seconds": 0.1}
    return Load(port=port, **{"dialect": "ours", **work, **more})


def push_right(observations: Any) -> Any:
    return np.ones(len(observations), np.int64)


@pytest.mark.slow
def test_rows_are_measured_and_reported_as_json(capsys: Capture) -> None:
    code = bench("serving", "--json", "--only", "rows", *TINY)

    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 0
    assert [event["event"] for event in events][:: len(events) - 1] == ["machine", "result"]
    measured = [event for event in events if event["event"] == "measurement"]
    assert {event["side"] for event in measured if event["workload"] == "rows"} == {
        "rlmesh-ray",
        "noop",
    }
    result = events[-1]
    assert result["is_complete"]
    (finding,) = [each for each in result["findings"] if each["workload"] == "rows"]
    ours, noop = finding["sides"]["rlmesh-ray"], finding["sides"]["noop"]
    assert finding["comparisons"]["/ noop"]["values"] == [ours["values"][0] / noop["values"][0]]
    # It names the released server, which was not measured.
    assert finding["goal"] == "/ released >= 2.5"
    assert finding["is_met"] is None
    assert result["settings"]["seconds"] == 0.05
    assert result["machine"]["cores"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "row"),
    [
        (["--only", "messages", "--client", "blocking", "--pin"], "32 routes in one stream"),
        pytest.param(["--only", "messages"], "32 routes in one stream", marks=pytest.mark.nightly),
        pytest.param(
            ["--only", "latency", "--client-processes", "2"],
            "noop, own load",
            marks=pytest.mark.nightly,
        ),
        pytest.param(["--only", "clients"], "256 clients", marks=pytest.mark.nightly),
        pytest.param(
            ["--only", "single", "--repetitions", "2"],
            "blocking, p90 (us)",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_every_workload_is_measured_and_shown(
    options: list[str], row: str, capsys: Capture
) -> None:
    # Beside another test, the first of so many answers may take longer than the tiny time.
    assert bench("serving", *options, *TINY, "--seconds", "0.5") == 0

    text = capsys.readouterr().out
    assert row in text
    assert "busy cores" in text


def test_new_weights_are_timed_for_dense_layers_and_convolutions(capsys: Capture) -> None:
    code = bench("weights", "--json", "--repetitions", "1")

    *_, result = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 0
    assert [each["case"] for each in result["findings"]] == [
        "dense, 1.0 M weights",
        "convolutional, 1.7 M weights",
    ]
    assert all(set(each["sides"]) == {"compiled", "torch"} for each in result["findings"])


@pytest.mark.nightly
def test_slow_policies_for_robots_are_measured(capsys: Capture) -> None:
    code = bench("robots", "--json", "--quick", "--seconds", "0.5")

    *_, result = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 0
    shares = {
        (each["workload"], each["case"]): next(iter(each["comparisons"].values()))["median"]
        for each in result["findings"]
    }
    assert list(shares)[:7] == [
        ("chunks", "one action a request"),
        ("chunks", "chunks of 8"),
        ("chunks", "chunks of 8, prefetch"),
        ("batched", "8 clients"),
        ("batched", "8 clients, max_delay_s=0.005"),
        ("openpi", "8 clients"),
        ("openpi", "8 clients, max_delay_s=0.005"),
    ]
    assert all(share > 0.0 for share in shares.values())


def test_options_before_the_subject_are_not_lost_silently() -> None:
    with pytest.raises(typer.BadParameter, match="options stand after serving"):
        bench("--quick", "serving")


@pytest.mark.parametrize("is_one_stream", [False, True])
def test_a_reading_has_what_the_clients_saw(is_one_stream: bool) -> None:
    with ModelServer(push_right) as server:
        reading = measure([os.getpid()], [load(server, is_one_stream=is_one_stream).job()])

    assert reading.answers_per_s > 0
    assert len(reading.latencies_us) >= 2
    assert len(reading.client_cores) == 1


def test_an_open_loop_is_answered_at_the_rate_of_its_arrivals() -> None:
    with ModelServer(push_right) as server:
        reading = measure([os.getpid()], [load(server, arrivals_per_s=200.0, seconds=1.0).job()])

    # A closed loop would ask thousands of times; 14 standard deviations above the schedule.
    assert 0 < reading.answers_per_s < 400
    assert reading.lags_us


def test_in_an_open_loop_a_server_that_stalls_is_waited_for_to_the_end() -> None:
    may_go_on = threading.Event()

    def stalls(observations: Any) -> Any:
        assert may_go_on.wait(60.0)
        return push_right(observations)

    with ModelServer(stalls) as server:
        try:
            work = load(server, arrivals_per_s=1_000.0, seconds=0.5)
            reading = measure([os.getpid()], [work.job()])
        finally:
            may_go_on.set()

    assert reading.answers_per_s == 0.0
    # Of Poisson's 550 on average, 512 may be in flight; the first ones have waited longest.
    assert len(reading.latencies_us) > 400
    assert max(reading.latencies_us) > 0.5e6


CLOSED, OPEN = None, 200.0


@pytest.mark.parametrize("arrivals_per_s", [CLOSED, OPEN])
def test_errors_are_no_measurement(arrivals_per_s: float | None) -> None:
    def broken(observations: Any) -> Any:
        raise RuntimeError("no weights")

    with (
        ModelServer(broken) as server,
        pytest.raises(EndpointError, match=r"nothing was measured: .*answered with .*no weights"),
    ):
        measure([os.getpid()], [load(server, arrivals_per_s=arrivals_per_s).job()])


def test_a_route_that_is_refused_is_no_measurement() -> None:
    class Choosy(CallablePolicy):
        def check_contract(self, contract: EnvContract) -> None:
            raise UnsupportedSpaceError("no lanes of this kind")

    with (
        ModelServer(Choosy(push_right)) as server,
        pytest.raises(EndpointError, match=r"a route was refused: .*no lanes of this kind"),
    ):
        measure([os.getpid()], [load(server).job()])


@pytest.mark.parametrize("arrivals_per_s", [CLOSED, OPEN])
def test_a_server_that_goes_is_no_measurement(arrivals_per_s: float | None) -> None:
    with ModelServer(push_right) as server:
        work = load(server, arrivals_per_s=arrivals_per_s)

    with pytest.raises(EndpointError, match=r"nothing was measured: .*ended the stream"):
        measure([os.getpid()], [work.job()])


TURNS_CLIENTS = [
    pytest.param(
        kind,
        marks=pytest.mark.skipif(kind not in installed_clients(), reason="needs node_modules"),
    )
    for kind in ClientKind
]


def take_turns(server: ModelServer, kind: ClientKind, num_routes: int = 1) -> list[Reading]:
    routes = [f"route-{index:03}" for index in range(num_routes)]
    job = TurnsJob(client_command(kind), routes, rows=2, is_one_stream=num_routes > 1)
    asked = AskedServer(server.address, os.getpid(), DIALECTS["ours"])
    return ask_by_turns([asked, asked], [job], warm_up_s=0.02, seconds=0.1)


@pytest.mark.parametrize("kind", TURNS_CLIENTS)
def test_clients_that_take_turns_have_a_reading_of_each_server(kind: ClientKind) -> None:
    with ModelServer(push_right) as server:
        readings = take_turns(server, kind)

    assert len(readings) == 2
    for reading in readings:
        assert reading.answers_per_s > 0
        assert reading.latencies_us
        assert len(reading.client_cores) == 1


@pytest.mark.parametrize("kind", [ClientKind.BLOCKING, ClientKind.ASYNCIO])
def test_routes_of_one_stream_take_turns_together(kind: ClientKind) -> None:
    with ModelServer(push_right) as server:
        readings = take_turns(server, kind, num_routes=3)

    assert all(len(reading.latencies_us) >= 3 for reading in readings)


@pytest.mark.parametrize("kind", TURNS_CLIENTS)
def test_errors_in_a_turn_are_no_measurement(kind: ClientKind) -> None:
    def broken(observations: Any) -> Any:
        raise RuntimeError("no weights")

    with (
        ModelServer(broken) as server,
        pytest.raises(EndpointError, match=r"nothing was measured: .*answered with .*no weights"),
    ):
        take_turns(server, kind)


@pytest.mark.parametrize("kind", TURNS_CLIENTS)
def test_a_server_that_is_gone_gives_no_turns(kind: ClientKind) -> None:
    with ModelServer(push_right) as server:
        pass

    with pytest.raises(EndpointError, match=r"nothing was measured: .*ended the stream"):
        take_turns(server, kind)


def test_a_server_that_does_not_start_says_why() -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such policy')"]

    with pytest.raises(EndpointError, match="the server ended early with code 1: no such policy"):
        Server("the server", command)


def test_chatter_is_not_taken_for_an_answer() -> None:
    with (
        Process("the server", [sys.executable, "-c", "print('hello')"]) as process,
        pytest.raises(EndpointError, match="hello"),
    ):
        process.receive()


def test_a_process_cleans_up_before_it_ends(tmp_path: Path) -> None:
    cleaned = tmp_path / "cleaned"
    script = (
        "import pathlib, sys; print('{}', flush=True); sys.stdin.read(); "
        f"pathlib.Path({str(cleaned)!r}).touch()"
    )

    with Process("the server", [sys.executable, "-c", script]) as process:
        process.receive()

    assert cleaned.exists()


def test_a_process_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_GRACE_S", 0.05)
    script = "import time; print('{}', flush=True); time.sleep(60)"

    with Process("the server", [sys.executable, "-c", script]) as process:
        process.receive()

    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_checkout_is_compared_with_another_one(capsys: Capture) -> None:
    itself = str(Path(__file__).parents[2])

    cases = ["--only", "step-1-tcp", "--only", "predict-8-one"]
    assert bench("checkouts", itself, "--json", *cases, "--rounds", "2", "--seconds", "0.05") == 0

    *_, result = map(json.loads, capsys.readouterr().out.splitlines())
    found = {each["case"]: each for each in result["findings"]}
    assert set(found) == {"step-1-tcp", "predict-8-one-stream"}
    for each in found.values():
        assert list(each["sides"]) == ["this checkout", "the other one"]
        assert all(min(side["values"]) > 0 for side in each["sides"].values())
        assert len(each["comparisons"]["/ the other one"]["values"]) == 2


def test_what_is_no_checkout_is_not_compared(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is not a checkout of rlmesh-ray"):
        bench("checkouts", str(tmp_path), "--only", "step-1-tcp")
    with pytest.raises(typer.BadParameter, match="no case begins so; there are step-1-grpc"):
        bench("checkouts", str(tmp_path), "--only", "walk")
