"""Deadlines, the time of grace after them, and everything else that goes wrong in a worker."""

import contextlib
import functools
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray import EnvServer
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import EnvClient
from rlmesh_ray.client.join_stream import JoinStream, open_call
from rlmesh_ray.envs.worker_channel import WorkerChannel, encode
from rlmesh_ray.errors import RemoteEnvError
from rlmesh_ray.protocol.messages import (
    Close,
    Closed,
    EnvFailed,
    EnvRequest,
    EnvResponse,
    Render,
    Reset,
    ResetDone,
    Step,
    StepDone,
)
from rlmesh_ray.spaces.batch import Column
from rlmesh_ray.testing.envs import Fault, FaultyEnv
from rlmesh_ray.wire.rlmesh_v1 import env as wire
from rlmesh_ray.wire.rlmesh_v1 import values
from tests.loopback.child_processes import worker_pids
from tests.loopback.client_internals import endpoints_give_up_after, step_timeout
from tests.loopback.eventually import eventually
from tests.loopback.lifelike import Breakable, Gated

TOLERANCE_S = 10.0
"""A busy machine may wake late; what waits here otherwise waits for ever."""
TICK_S = 0.001
"""uvloop's timers count in these, from when the loop last woke: they may be early by one."""
DEADLINE_MS = 150
FOREVER_S = 1000.0


class Session:
    """A Join that measures how long each answer takes."""

    def __init__(self, server: EnvServer) -> None:
        assert server.contract is not None
        self._contract = server.contract
        self._channel = ConnectOptions(server.address).open()
        path = "/rlmesh.env.v1.EnvService/Join"
        self._stream = JoinStream(open_call(self._channel, path, ()), server.address)
        self.elapsed_s = 0.0

    def send(self, request: EnvRequest) -> None:
        self._sent_s = time.monotonic()
        self._stream.send(wire.pack_request(request))

    def receive(self) -> EnvResponse:
        response = wire.parse_response(self._stream.receive(30.0))
        self.elapsed_s = time.monotonic() - self._sent_s
        return response

    def receive_aside(self) -> "Future[EnvResponse]":
        """Receive in a thread, so that nothing else delays the measurement."""
        future: Future[EnvResponse] = Future()
        threading.Thread(target=lambda: future.set_result(self.receive()), daemon=True).start()
        return future

    def ask(self, request: EnvRequest) -> EnvResponse:
        self.send(request)
        return self.receive()

    def reset(self, timeout_ms: int = 0, **options: object) -> ResetDone:
        done = self.ask(Reset("reset", (), options, timeout_ms))
        assert isinstance(done, ResetDone), done
        return done

    def step(self, timeout_ms: int = 0) -> StepDone:
        done = self.ask(self.step_request(timeout_ms))
        assert isinstance(done, StepDone), done
        return done

    def step_request(self, timeout_ms: int, *columns: Column) -> Step:
        space = self._contract.action_space
        action = values.encode_batch(space, list(columns) or [np.zeros(1, np.int64)], 1)
        return Step("step", action, timeout_ms)

    def count(self, done: ResetDone | StepDone) -> float:
        """Return the one number that the observation is."""
        space = self._contract.observation_space
        (column,) = values.decode_batch(space, done.observation, 1)
        return float(np.asarray(column).item())

    def close(self) -> None:
        self._stream.close()
        self._channel.close()


def assert_timed_out(session: Session, response: EnvResponse, timeout_ms: int) -> None:
    assert isinstance(response, EnvFailed), response
    assert (response.code.name, response.is_recoverable) == ("TIMEOUT", True)
    assert session.elapsed_s >= timeout_ms / 1000 - TICK_S
    assert session.elapsed_s <= timeout_ms / 1000 + TOLERANCE_S


def pid_of(done: ResetDone) -> int:
    return int(done.infos["pid"][0])  # type: ignore[index]


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.fixture(scope="module")
def breakable_server() -> Iterator[EnvServer]:
    with EnvServer(Breakable, _step_grace_s=0.0) as server:
        yield server


def test_an_environment_that_misses_its_deadline_delays_no_other_session(
    breakable_server: EnvServer,
) -> None:
    with (
        closing(Session(breakable_server)) as session,
        closing(Session(breakable_server)) as other,
    ):
        session.reset(fault="SPIN", at_step=2)
        assert session.count(session.step()) == pytest.approx(0.01)

        session.send(session.step_request(DEADLINE_MS))
        answer = session.receive_aside()
        other.reset(timeout_ms=20_000)
        other.step()
        response = answer.result(20.0)

        assert_timed_out(session, response, DEADLINE_MS)
        assert isinstance(response, EnvFailed)
        (interrupted,) = response.interrupted_episodes
        assert interrupted.step_count == 1


class Hanging(FaultyEnv):
    """Hangs in its second step, and leaves a file that says so."""

    def __init__(self, sign: Path) -> None:
        super().__init__(Fault.HANG, at_step=2)
        self._sign = sign
        self._num_steps = 0

    def step(self, action: Any) -> Any:
        self._num_steps += 1
        if self._num_steps == 2:
            self._sign.touch()
        return super().step(action)


def test_a_session_starts_anew_where_the_process_that_it_was_to_share_is_killed(
    tmp_path: Path,
) -> None:
    server = EnvServer(
        Hanging, env_kwargs={"sign": tmp_path / "hangs"}, _step_grace_s=0.0, sessions_per_worker=2
    )
    with server, closing(Session(server)) as session, closing(Session(server)) as other:
        session.reset()
        session.step()
        session.send(session.step_request(DEADLINE_MS))
        answer = session.receive_aside()

        assert eventually((tmp_path / "hangs").exists)  # or the other one would join in before
        other.reset(timeout_ms=20_000)
        other.step()

        assert_timed_out(session, answer.result(20.0), DEADLINE_MS)


class Slow(gymnasium.Env[Any, Any]):
    """Observes its step count; hangs on request, for as long as ``gate`` is not opened."""

    observation_space = spaces.Discrete(1000)
    action_space = spaces.Discrete(2)

    def __init__(self, gate: str) -> None:
        self._gate = gate
        self._hangs = False
        self._count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._hangs = bool(options and options.get("hangs"))
        self._count = 0
        return 0, {"pid": os.getpid()}

    def step(self, action: Any) -> Any:
        self._count += 1
        if self._hangs and self._count == 3:
            with open(self._gate):
                pass
        return self._count, 1.0, False, False, {}

    def render(self) -> Any:
        return None


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


def test_a_client_that_leaves_in_a_step_costs_no_other_session_of_its_process_an_episode(
    gate: Path,
) -> None:
    class Noted(Slow):
        def step(self, action: Any) -> Any:
            if self._hangs and self._count == 2:
                gate.with_name("begun").touch()
            return super().step(action)

    server = EnvServer(lambda: Noted(str(gate)), sessions_per_worker=2)
    with server, closing(Session(server)) as session, closing(Session(server)) as other:
        other.reset()
        session.reset(hangs=True)
        for _ in range(2):
            session.step()
        session.send(session.step_request(0))
        assert eventually(gate.with_name("begun").exists)
        # The other one's step waits behind the step that hangs.
        other.send(other.step_request(20_000))
        answer = other.receive_aside()
        session.close()
        assert eventually(lambda: server.num_sessions == 1)
        gate.write_bytes(b"")  # the step ends

        done = answer.result(20.0)
        assert isinstance(done, StepDone), done
        assert other.count(done) == 1


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EnvServer, Path]]:
    """Serve an environment that may go on for ever after its deadline; also return its gate."""
    path = tmp_path_factory.mktemp("patient") / "gate"
    os.mkfifo(path)
    with EnvServer(lambda: Slow(str(path)), _step_grace_s=FOREVER_S) as server:
        yield server, path


def run_into_the_deadline(session: Session) -> int:
    """Let the third step of an episode time out; return the worker's process id."""
    pid = pid_of(session.reset(hangs=True))
    session.step()
    session.step()
    response = session.ask(session.step_request(DEADLINE_MS))
    assert_timed_out(session, response, DEADLINE_MS)
    return pid


@pytest.mark.parametrize("is_early", [True, False], ids=["before", "after"])
def test_a_worker_that_finishes_in_the_time_of_grace_serves_on(
    patient: tuple[EnvServer, Path], is_early: bool
) -> None:
    server, gate = patient
    with closing(Session(server)) as session:
        pid = run_into_the_deadline(session)

        if is_early:
            gate.write_text("")
        session.send(Reset("again"))
        if not is_early:
            gate.write_text("")
        again = session.receive()

        assert isinstance(again, ResetDone)
        assert pid_of(again) == pid
        # Nothing of the late third step: neither its answer nor its count.
        assert session.count(again) == 0
        assert [session.count(session.step()) for _ in range(3)] == [1, 2, 3]


def test_a_worker_that_does_not_finish_in_the_time_of_grace_is_replaced(gate: Path) -> None:
    server = EnvServer(lambda: Slow(str(gate)), _step_grace_s=0.2)
    with server, closing(Session(server)) as session:
        pid = run_into_the_deadline(session)

        again = session.reset()

        assert pid_of(again) != pid
        assert not is_running(pid)
        assert [session.count(session.step()) for _ in range(3)] == [1, 2, 3]


def test_a_reset_in_the_time_of_grace_keeps_its_own_deadline(
    patient: tuple[EnvServer, Path],
) -> None:
    server, gate = patient
    with closing(Session(server)) as session:
        pid = run_into_the_deadline(session)

        for kind in (Reset, Render):
            request = kind("early", timeout_ms=DEADLINE_MS)
            response = session.ask(request)
            assert_timed_out(session, response, DEADLINE_MS)
            assert isinstance(response, EnvFailed)
            assert "still busy with an earlier request" in response.message
        gate.write_text("")

        assert pid_of(session.reset()) == pid


@pytest.mark.parametrize("end", ["close", "vanish", "stop"])
def test_a_session_that_ends_in_the_time_of_grace_leaves_nothing_behind(
    patient: tuple[EnvServer, Path], gate: Path, end: str
) -> None:
    own = EnvServer(lambda: Slow(str(gate)), _step_grace_s=FOREVER_S)
    serving = own if end == "stop" else contextlib.nullcontext(patient[0])
    with serving as server, closing(Session(server)) as session:
        pid = run_into_the_deadline(session)

        if end == "close":
            session.ask(Close("close"))
        elif end == "vanish":
            session.close()
        else:
            server.stop()

        assert eventually(lambda: server.num_sessions == 0 and not is_running(pid))


class Reader(gymnasium.Env[Any, Any]):
    """Takes texts of any length; observes how many it has taken."""

    observation_space = spaces.Discrete(1000)
    action_space = spaces.Text(10**7, charset="x")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._count = 0
        return 0, {"pid": os.getpid()}

    def step(self, action: Any) -> Any:
        self._count += 1
        return self._count, float(len(action)), False, False, {}


def test_a_frozen_worker_that_reads_nothing_delays_no_other_session() -> None:
    with (
        EnvServer(Reader, _step_grace_s=FOREVER_S) as server,
        closing(Session(server)) as session,
        closing(Session(server)) as other,
    ):
        text = "x" * 5_000_000
        pid = pid_of(session.reset())
        other.reset()
        os.kill(pid, signal.SIGSTOP)

        session.send(session.step_request(500, (text,)))
        answer = session.receive_aside()
        for _ in range(10):
            other.ask(other.step_request(0, ("xxx",)))
        response = answer.result(20.0)

        assert_timed_out(session, response, 500)
        os.kill(pid, signal.SIGCONT)
        assert pid_of(session.reset()) == pid
        done = session.ask(session.step_request(20_000, (text,)))
        assert isinstance(done, StepDone)
        assert (session.count(done), list(done.rewards)) == (1, [5_000_000.0])


class Stammering(Slow):
    """Starts to send a reply of its own in its first step, and hangs."""

    def step(self, action: Any) -> Any:
        (channel,) = (thing for thing in gc.get_objects() if type(thing) is WorkerChannel)
        channel.send(encode("a reply that is cut off")[:20])
        with open(self._gate):
            pass


def test_half_a_reply_delays_no_other_session(gate: Path) -> None:
    with (
        EnvServer(lambda: Stammering(str(gate)), _step_grace_s=0.0) as server,
        closing(Session(server)) as session,
        closing(Session(server)) as other,
    ):
        pid = pid_of(session.reset())

        session.send(session.step_request(500))
        answer = session.receive_aside()
        for _ in range(10):
            other.reset()
        response = answer.result(20.0)

        assert_timed_out(session, response, 500)
        assert pid_of(session.reset()) != pid


@pytest.fixture(scope="module")
def breakable(breakable_server: EnvServer) -> Iterator[Session]:
    with closing(Session(breakable_server)) as session:
        yield session


TRACEBACK = "Traceback (most recent call last)"
CODES_AND_TRACES = {
    Fault.RAISE: ("INTERNAL", TRACEBACK),
    Fault.SYSTEM_EXIT: ("INTERNAL", TRACEBACK),
    Fault.KEYBOARD_INTERRUPT: ("INTERNAL", TRACEBACK),
    Fault.EXIT: ("CRASHED", ""),
    Fault.ABORT: ("CRASHED", "Fatal Python error: Aborted"),
    Fault.SEGFAULT: ("CRASHED", "Fatal Python error: Segmentation fault"),
    Fault.HANG: ("TIMEOUT", ""),
    Fault.SPIN: ("TIMEOUT", ""),
}


# One of each code; a reset and a step take the same way back.
AT_THE_RESET_TOO = (Fault.RAISE, Fault.EXIT, Fault.HANG)


@pytest.mark.parametrize(
    ("fault", "at_step"),
    [
        pytest.param(
            fault,
            at_step,
            id=f"{fault.name} {'at a step' if at_step else 'at the reset'}",
            marks=[] if at_step or fault in AT_THE_RESET_TOO else [pytest.mark.slow],
        )
        for fault in CODES_AND_TRACES
        for at_step in (0, 1)
    ],
)
def test_every_failure_is_reported_and_the_same_stream_goes_on(
    breakable: Session, fault: Fault, at_step: int
) -> None:
    code, trace = CODES_AND_TRACES[fault]
    # A stream that one fault had ended would fail all tests after it.
    timeout_ms = DEADLINE_MS if code == "TIMEOUT" else 20_000
    options = {"fault": fault.name, "at_step": at_step}
    reset = Reset("reset", (), options, 20_000 if at_step else timeout_ms)
    breakable.reset()

    response = breakable.ask(reset)
    if at_step:
        assert isinstance(response, ResetDone), response
        response = breakable.ask(breakable.step_request(timeout_ms))

    assert isinstance(response, EnvFailed)
    assert (response.code.name, response.is_recoverable) == (code, True)
    assert response.debug_info.startswith(trace)
    assert ("testing/envs.py" in response.debug_info) == bool(trace)
    assert len(response.interrupted_episodes) == 1
    breakable.reset()
    assert breakable.count(breakable.step()) == pytest.approx(0.01)


class SlowToStart(Slow):
    """Its constructor, its close or neither waits until ``gate`` is opened, as a file says."""

    answer = 42

    def __init__(self, gate: str) -> None:
        super().__init__(gate)
        self._wait("constructor")

    def close(self) -> None:
        self._wait("close")

    def _wait(self, place: str) -> None:
        if Path(f"{self._gate}.{place}").exists():
            with open(self._gate):
                pass


@pytest.fixture
def start_server(gate: Path) -> Callable[[int], EnvServer]:
    return lambda max_sessions: EnvServer(
        lambda: SlowToStart(str(gate)),
        max_sessions=max_sessions,
        _step_grace_s=0.0,
        allow_calls=("answer",),
    )


def assert_reset_times_out(session: Session, why: str) -> None:
    response = session.ask(Reset("reset", timeout_ms=DEADLINE_MS))
    assert_timed_out(session, response, DEADLINE_MS)
    assert isinstance(response, EnvFailed)
    assert why in response.message


def test_the_first_reset_keeps_its_deadline_while_the_environment_starts(
    gate: Path, start_server: Callable[[int], EnvServer]
) -> None:
    with (
        start_server(2) as server,
        closing(Session(server)) as first,
        closing(Session(server)) as second,
    ):
        first.reset()
        Path(f"{gate}.constructor").touch()

        assert_reset_times_out(second, "has not started within")
        assert_reset_times_out(second, "has not started within")
        gate.write_text("")  # for one process: a second one would wait for ever
        second.reset()

        assert second.count(second.step()) == 1


@pytest.fixture
def impatient() -> Iterator[None]:
    with endpoints_give_up_after(700):
        yield


@pytest.mark.usefixtures("impatient")
def test_a_slow_start_of_the_environment_does_not_count_against_the_step_timeout(
    gate: Path, start_server: Callable[[int], EnvServer]
) -> None:
    with start_server(2) as server, closing(Session(server)) as first:
        first.reset()
        Path(f"{gate}.constructor").touch()
        client = EnvClient(ConnectOptions(server.address))
        with ThreadPoolExecutor() as pool, closing(client):
            reset = pool.submit(client.reset)
            assert eventually(lambda: server.statistics().errors.get("TIMEOUT", 0) >= 1)
            gate.write_text("")

            assert reset.result(60.0).episode_ids != ("",)


@pytest.mark.usefixtures("impatient")
def test_a_call_before_the_first_reset_waits_for_a_slow_start(
    gate: Path, start_server: Callable[[int], EnvServer], caplog: pytest.LogCaptureFixture
) -> None:
    with start_server(2) as server, closing(Session(server)) as first:
        first.reset()
        Path(f"{gate}.constructor").touch()
        client = EnvClient(ConnectOptions(server.address))
        with ThreadPoolExecutor() as pool, closing(client):
            called = pool.submit(client.call, "answer")
            assert eventually(lambda: "has not started within" in caplog.text)
            gate.write_text("")

            assert called.result(60.0) == (42,)


def test_an_environment_that_never_starts_is_given_up_after_start_timeout_s(
    gate: Path, start_server: Callable[[int], EnvServer]
) -> None:
    with start_server(2) as server, closing(Session(server)) as first:
        first.reset()
        Path(f"{gate}.constructor").touch()
        client = EnvClient(ConnectOptions(server.address), start_timeout_s=1.0)
        with closing(client):
            with (
                endpoints_give_up_after(700),
                pytest.raises(RemoteEnvError, match=r"within 1 s; .* raise start_timeout_s"),
            ):
                client.reset()
            assert server.statistics().errors["TIMEOUT"] >= 2

            gate.write_text("")
            client.reset()


@pytest.mark.usefixtures("impatient")
def test_a_reset_that_hangs_keeps_its_deadline_however_long_a_start_may_take(
    breakable_server: EnvServer,
) -> None:
    client = EnvClient(ConnectOptions(breakable_server.address))
    with closing(client):
        client.reset()
        with pytest.raises(RemoteEnvError, match="no result within 700 ms"):
            client.reset(options={"fault": "HANG", "at_step": 0})


@pytest.mark.parametrize("transport", ["grpc", "shared_memory", "tcp"])
def test_a_step_that_contains_resets_has_the_limit_of_a_reset(transport: str, gate: Path) -> None:
    limits_s: list[float] = []

    class Noting(EnvClient):
        def _server_timeout_ms(self, limit_s: float) -> int:
            limits_s.append(limit_s)
            return super()._server_timeout_ms(limit_s)

    def two_steps_an_episode() -> gymnasium.Env[Any, Any]:
        return gymnasium.wrappers.TimeLimit(Slow(str(gate)), 2)

    with EnvServer(two_steps_an_episode, num_envs=2) as server:
        client = Noting(
            ConnectOptions(server.address),
            step_timeout_s=30.0,
            reset_timeout_s=90.0,
            transport=transport,
        )
        with closing(client):
            client.reset()
            limits_s.clear()
            for _ in range(5):
                client.step([np.zeros(2, np.int64)])
            client.reset()  # after the end of the second episode, as RemoteEnv's users do
            client.step([np.zeros(2, np.int64)])

        assert limits_s == [30.0, 30.0, 90.0, 30.0, 30.0, 90.0, 30.0]


class SlowToReset(Slow):
    """Its reset waits until ``gate`` is opened."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        with open(self._gate):
            pass
        return super().reset(seed=seed, options=options)


def test_a_reset_that_is_late_names_its_lanes_and_the_option_to_raise(gate: Path) -> None:
    env = functools.partial(SlowToReset, str(gate))
    with EnvServer(env, num_envs=2, _step_grace_s=0.0) as server:
        client = EnvClient(ConnectOptions(server.address), reset_timeout_s=2.0)
        with closing(client), pytest.raises(RemoteEnvError) as caught:
            client.reset()

    assert caught.value.message == (
        "no result within 2 s: the reset of 2 lanes, of which 0 had been reset; raise "
        "reset_timeout_s (--reset-timeout of train and evaluate)"
    )


def test_a_session_without_a_worker_draws_nothing_closes_and_leaves_its_place(
    start_server: Callable[[int], EnvServer],
) -> None:
    with start_server(1) as server:
        for _ in range(3):
            with closing(Session(server)) as session:
                early = session.ask(session.step_request(0))
                drawn = session.ask(Render("render"))
                closed = session.ask(Close("close"))

                assert isinstance(early, EnvFailed)
                assert early.code.name == "NOT_READY"
                assert not getattr(drawn, "png", None)
                assert isinstance(closed, Closed)
        assert eventually(lambda: server.num_sessions == 0)


def test_a_session_that_leaves_while_its_worker_starts_leaves_it_to_the_next(
    gate: Path, start_server: Callable[[int], EnvServer]
) -> None:
    with start_server(2) as server, closing(Session(server)) as first:
        first.reset()
        Path(f"{gate}.constructor").touch()
        with closing(Session(server)) as second:
            assert_reset_times_out(second, "has not started within")
        assert eventually(lambda: server.num_sessions == 1)

        with closing(Session(server)) as third:
            gate.write_text("")
            third.reset()


@pytest.mark.slow  # it has five seconds for its end
def test_an_environment_that_hangs_when_it_closes_holds_no_place(
    gate: Path, start_server: Callable[[int], EnvServer]
) -> None:
    with start_server(1) as server:
        with closing(Session(server)) as session:
            pid = pid_of(session.reset())
            Path(f"{gate}.close").touch()
            session.ask(Close("close"))
        start_s = time.monotonic()
        with closing(Session(server)) as session:
            session.reset()

            assert not is_running(pid)
            assert time.monotonic() - start_s < 30.0
        Path(f"{gate}.close").unlink()


def test_a_spare_environment_that_is_slow_to_start_holds_no_place(
    gate: Path, start_server: Callable[[int], EnvServer]
) -> None:
    with start_server(1) as server:
        with closing(Session(server)) as session:
            pid = pid_of(session.reset())
            Path(f"{gate}.constructor").touch()
            session.ask(Close("close"))
        assert eventually(lambda: server.num_sessions == 0)

        with closing(Session(server)) as session:
            assert_reset_times_out(session, "has not started within")
            gate.write_text("")
            assert pid_of(session.reset()) == pid  # in the process of the former session


def test_stopping_ends_the_start_of_a_spare_worker(
    gate: Path, start_server: Callable[[int], EnvServer]
) -> None:
    with start_server(1) as server:
        with closing(Session(server)) as session:
            pid = pid_of(session.reset())
            others = worker_pids() - {pid}
            Path(f"{gate}.constructor").touch()
            session.ask(Close("close"))
        assert eventually(lambda: server.num_sessions == 0)
        assert eventually(lambda: len(worker_pids() - others) == 1)

    assert eventually(lambda: not worker_pids() - others)


def test_resets_that_come_too_early_after_a_timeout_keep_none_of_the_later_ones_away(
    tmp_path: Path,
) -> None:
    gate = tmp_path / "gate"
    with EnvServer(functools.partial(Gated, str(gate)), _step_grace_s=FOREVER_S) as server:
        client = EnvClient(ConnectOptions(server.address), step_timeout_s=30.0, transport="grpc")
        client.reset()
        with step_timeout(client, 2.0):
            with pytest.raises(RemoteEnvError, match="no result within"):
                client.step([np.zeros(1, np.int64)])
            for _ in range(2):
                with pytest.raises(RemoteEnvError, match="still busy"):
                    client.reset()
        gate.touch()

        for _ in range(3):
            assert client.reset().observation[0] == 0
            assert client.step([np.zeros(1, np.int64)]).observation[0] == 1
        client.close()
