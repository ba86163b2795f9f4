"""Real worker processes, as an endpoint starts and uses them."""

import asyncio
import ctypes
import errno
import io
import math
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium.spaces import Dict, Discrete, Graph
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from PIL import Image

from rlmesh_ray.envs.commands import (
    Command,
    OpenDirectCommand,
    Outcome,
    RenderCommand,
    RenderReply,
    ResetCommand,
    ResetReply,
    StepCommand,
    StepReply,
)
from rlmesh_ray.envs.env_source import EnvLike, make_source
from rlmesh_ray.envs.worker_process import WorkerProcess
from rlmesh_ray.errors import EnvStartError
from rlmesh_ray.protocol.env_session import Failure, FailureKind
from rlmesh_ray.server.env.session_worker import take_reply, wait_for_reply
from rlmesh_ray.spaces.batch import unflatten
from rlmesh_ray.spaces.validation import ValidationMode, coerce_batch
from rlmesh_ray.testing.envs import SPACES, EchoEnv, Fault, FaultyEnv
from rlmesh_ray.testing.equality import assert_identical
from tests.loopback.child_processes import arrives, worker_pids

ROOT = Path(__file__).parents[2]
EVERY_KIND = Dict({name.replace(" ", "_"): space for name, space in SPACES.items()})

Start = Callable[..., WorkerProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[WorkerProcess] = []

    def start_one(
        env: EnvLike, num_envs: int = 1, validation: ValidationMode = ValidationMode.WARN
    ) -> WorkerProcess:
        worker = WorkerProcess.start(make_source(env, num_envs), validation=validation)
        started.append(worker)
        return worker

    yield start_one
    for worker in started:
        worker.kill()


@pytest.fixture(scope="module")
def cart_pole() -> Iterator[WorkerProcess]:
    """Yield a worker that tests leave as it was, with an episode that has begun."""
    worker = WorkerProcess.start(make_source("CartPole-v1"), validation=ValidationMode.WARN)
    assert isinstance(ask(worker, ResetCommand()), ResetReply)
    yield worker
    worker.kill()


def ask(worker: WorkerProcess, command: Command) -> Outcome:
    worker.submit(command)
    return worker.receive()


def step(worker: WorkerProcess, actions: Any) -> Outcome:
    contract = worker.contract
    columns = coerce_batch(contract.action_space, actions, contract.num_envs)
    for target, column in zip(worker.buffers.actions, columns, strict=True):
        if not isinstance(target, tuple):
            target[...] = column
    texts = tuple(column for column in columns if isinstance(column, tuple))
    return ask(worker, StepCommand(texts))


def observation(worker: WorkerProcess, reply: Outcome) -> Any:
    assert isinstance(reply, (ResetReply, StepReply))
    texts = iter(reply.text_columns)
    columns = [next(texts) if isinstance(c, tuple) else c for c in worker.buffers.observations]
    return unflatten(worker.contract.observation_space, columns)


def infos_of(reply: Outcome) -> Any:
    assert isinstance(reply, (ResetReply, StepReply)), reply
    return reply.infos


def wait_for_end(pid: int, timeout_s: float = 20.0) -> bool:
    """Wait until process ``pid`` has ended; it need not be a child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        return bool(waiting.poll(timeout_s * 1000))
    finally:
        os.close(descriptor)


def exists(pid: int) -> bool:
    """Return whether there is such a process, be it a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --- trajectories -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", [None, AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_trajectory_is_that_of_the_environment_in_process(
    start: Start, mode: AutoresetMode | None
) -> None:
    def echo() -> EchoEnv:
        return EchoEnv(EVERY_KIND)

    if mode is None:
        worker = start(echo, 3)
    else:
        worker = start(lambda: SyncVectorEnv([echo] * 3, autoreset_mode=mode))
    bare = SyncVectorEnv([echo] * 3, autoreset_mode=mode or AutoresetMode.NEXT_STEP)
    bare.action_space.seed(1)

    reply = ask(worker, ResetCommand(seeds=(5, 6, 7)))
    assert_identical((observation(worker, reply), infos_of(reply)), bare.reset(seed=5))
    for _ in range(15):
        actions = bare.action_space.sample()
        reply = step(worker, actions)
        results = worker.buffers.results
        flags = (results.rewards, results.terminated, results.truncated)
        assert_identical((observation(worker, reply), *flags, infos_of(reply)), bare.step(actions))


def test_one_lane_is_the_single_environment(cart_pole: WorkerProcess) -> None:
    bare = gymnasium.make("CartPole-v1")

    reply = ask(cart_pole, ResetCommand(seeds=(11,)))
    assert_identical(observation(cart_pole, reply)[0], bare.reset(seed=11)[0])
    for number in range(10):
        reply = step(cart_pole, np.array([number % 2]))
        expected = bare.step(np.int64(number % 2))
        assert_identical(observation(cart_pole, reply)[0], expected[0])
        assert cart_pole.buffers.results.rewards[0] == expected[1]
        assert cart_pole.buffers.results.terminated[0] == expected[2]


def test_a_partial_reset_leaves_the_other_lanes_alone(start: Start) -> None:
    worker = start(lambda: EchoEnv(SPACES["text"]), 3)
    before = observation(worker, ask(worker, ResetCommand(seeds=(1, 2, 3))))

    reply = ask(worker, ResetCommand(seeds=(9,), lanes=(1,)))
    after = observation(worker, reply)

    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1] == EchoEnv(SPACES["text"]).reset(seed=9)[0]
    assert infos_of(reply)["_length"].tolist() == [False, True, False]


def test_the_last_infos_of_ended_lanes_are_reported(start: Start) -> None:
    worker = start(lambda: EchoEnv(SPACES["discrete"], max_length=1), 2)
    ask(worker, ResetCommand())

    reply = step(worker, np.array([0, 1]))

    assert isinstance(reply, StepReply)
    assert {lane: infos["step"] for lane, infos in reply.final_infos.items()} == {0: 1, 1: 1}


def test_a_picture_is_a_png(start: Start) -> None:
    worker = start(lambda: EchoEnv(SPACES["box"], render_mode="rgb_array"))
    ask(worker, ResetCommand())

    reply = ask(worker, RenderCommand())

    assert isinstance(reply, RenderReply)
    assert reply.png is not None
    with Image.open(io.BytesIO(reply.png), formats=["PNG"]) as image:
        assert image.size == (8, 6)


# --- what goes wrong ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault.RAISE, "ValueError: the environment is broken"),
        (Fault.SYSTEM_EXIT, "SystemExit: 3"),
        (Fault.KEYBOARD_INTERRUPT, "KeyboardInterrupt"),
    ],
)
def test_what_the_environment_raises_is_reported_and_the_worker_lives(
    start: Start, fault: Fault, message: str
) -> None:
    worker = start(lambda: FaultyEnv(fault, at_step=1))
    ask(worker, ResetCommand())

    reply = step(worker, np.array([0]))

    assert isinstance(reply, Failure)
    assert reply.kind is FailureKind.RAISED
    assert reply.message == f"{message}, in lane 0, at step 1 of its episode"
    assert "_BREAKDOWNS[self._fault]()" in reply.debug_info
    assert worker.is_alive
    assert isinstance(ask(worker, ResetCommand()), ResetReply)


@pytest.mark.parametrize(
    ("fault", "status", "fault_log"),
    [
        (Fault.EXIT, "ended with exit code 3", ""),
        (Fault.ABORT, "was killed by SIGABRT", "Fatal Python error: Aborted"),
        (Fault.SEGFAULT, "was killed by SIGSEGV", "Fatal Python error: Segmentation fault"),
    ],
)
def test_the_death_of_the_worker_is_reported(
    start: Start, fault: Fault, status: str, fault_log: str
) -> None:
    worker = start(lambda: FaultyEnv(fault))
    ask(worker, ResetCommand())

    reply = step(worker, np.array([0]))

    assert isinstance(reply, Failure)
    assert reply.kind is FailureKind.CRASHED
    assert reply.message == f"the environment's process {status}"
    assert reply.debug_info.startswith(fault_log)
    assert ("rlmesh_ray/testing/envs.py" in reply.debug_info) == bool(fault_log)
    assert not worker.is_alive
    assert not exists(worker.pid)
    assert ask(worker, ResetCommand()) == reply


def test_a_process_without_a_channel_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = iter([socket.socketpair()])

    def open_pair() -> tuple[socket.socket, socket.socket]:
        if pair := next(pairs, None):
            return pair
        raise OSError("Too many open files")

    before = worker_pids()
    monkeypatch.setattr(socket, "socketpair", open_pair)
    with pytest.raises(OSError, match="Too many open files"):
        WorkerProcess.new()

    assert worker_pids() == before


def test_its_death_is_seen_although_a_forked_process_lives_on(start: Start) -> None:
    class Forking(EchoEnv):
        def reset(self, **kwargs: Any) -> Any:
            child = os.fork()
            if child == 0:
                signal.pause()
            return super().reset(options={"child": child})

    worker = start(lambda: Forking(SPACES["box"]))
    child = infos_of(ask(worker, ResetCommand()))["child"][0]

    os.kill(worker.pid, signal.SIGKILL)

    assert arrives(worker.channel, 20.0)
    failure = worker.receive()
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.CRASHED
    assert "SIGKILL" in failure.message
    assert wait_for_end(child)


def test_an_environment_that_never_pauses_can_be_killed(start: Start) -> None:
    worker = start(lambda: FaultyEnv(Fault.SPIN))
    ask(worker, ResetCommand())
    worker.submit(StepCommand())
    has_answered = arrives(worker.channel, 0.05)

    worker.kill()

    assert not has_answered
    assert not exists(worker.pid)


def test_closing_does_not_wait_for_a_hanging_environment(start: Start) -> None:
    worker = start(lambda: FaultyEnv(Fault.HANG))
    ask(worker, ResetCommand())
    worker.submit(StepCommand())

    worker.close(timeout_s=0.1)

    assert not exists(worker.pid)


def test_a_kill_from_another_thread_ends_the_wait(start: Start) -> None:
    worker = start(lambda: FaultyEnv(Fault.HANG))
    ask(worker, ResetCommand())
    worker.submit(StepCommand())
    outcomes: list[Outcome] = []
    waiter = threading.Thread(target=lambda: outcomes.append(worker.receive()))
    waiter.start()

    worker.kill()
    waiter.join(20.0)

    assert [outcome.kind for outcome in outcomes if isinstance(outcome, Failure)] == [
        FailureKind.CRASHED
    ]


def test_the_event_loop_finds_a_reply_that_was_read_already(cart_pole: WorkerProcess) -> None:
    cart_pole.submit(ResetCommand())
    assert arrives(cart_pole.channel, 20.0)

    async def wait() -> tuple[bool, Outcome]:
        now_s = asyncio.get_running_loop().time()
        return await wait_for_reply(cart_pole, now_s + 20.0), await take_reply(cart_pole)

    is_there, reply = asyncio.run(wait())

    assert is_there
    assert isinstance(reply, ResetReply)


def test_the_event_loop_gives_up_at_the_deadline_and_may_wait_again(
    start: Start, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    class AdaptivePoller(EchoEnv):
        def reset(self, **kwargs: Any) -> Any:
            gate.read_text()
            return super().reset(**kwargs)

    worker = start(lambda: AdaptivePoller(SPACES["box"]))

    async def wait() -> tuple[bool, bool, Outcome]:
        worker.submit(ResetCommand())
        now_s = asyncio.get_running_loop().time()
        early = await wait_for_reply(worker, now_s + 0.05)
        gate.write_text("")
        return early, await wait_for_reply(worker, math.inf), await take_reply(worker)

    early, late, reply = asyncio.run(wait())

    assert (early, late) == (False, True)
    assert isinstance(reply, ResetReply)


def test_a_refused_action_leaves_the_environment_usable(cart_pole: WorkerProcess) -> None:
    ask(cart_pole, ResetCommand())

    refused = step(cart_pole, np.array([2]))
    accepted = step(cart_pole, np.array([1]))

    assert isinstance(refused, Failure)
    assert refused.kind is FailureKind.BAD_ACTION
    assert isinstance(accepted, StepReply)


# --- starting --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "words", "is_wrong_usage"),
    [
        ("CartPol-v1", "cannot create CartPol-v1: .*Did you mean: `CartPole`", True),
        ("no_such_module:Env-v0", "No module named 'no_such_module'.*PYTHONPATH", True),
        (lambda: sys.exit(3), "cannot create .*<lambda>: SystemExit: 3", False),
        (lambda: EchoEnv(Graph(Discrete(2), None)), "Graph", False),
    ],
)
def test_an_environment_that_cannot_be_created_is_explained(
    start: Start, env: EnvLike, words: str, is_wrong_usage: bool
) -> None:
    with pytest.raises(EnvStartError, match=words) as caught:
        start(env)

    assert "\n" not in str(caught.value)
    assert caught.value.is_wrong_usage is is_wrong_usage


def test_the_stack_of_a_start_that_crashed_is_kept(start: Start) -> None:
    with pytest.raises(EnvStartError, match="its process was killed by SIGSEGV") as caught:
        start(lambda: ctypes.string_at(0))

    assert caught.value.traceback_text.startswith("Fatal Python error: Segmentation fault")


def test_a_factory_by_reference_is_found_on_the_parent_s_path(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "house_of_envs.py").write_text(
        "import gymnasium\ndef make():\n    return gymnasium.make('CartPole-v1')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "as/before")
    import house_of_envs  # type: ignore[import-not-found]

    class Surrounded(gymnasium.Wrapper[Any, Any, Any, Any]):
        def reset(self, **kwargs: Any) -> Any:
            first, _ = super().reset(**kwargs)
            return first, {"pythonpath": os.environ["PYTHONPATH"]}

    by_reference = start(house_of_envs.make)
    surrounded = start(lambda: Surrounded(house_of_envs.make()))

    assert by_reference.contract.id == "CartPole-v1"
    assert infos_of(ask(surrounded, ResetCommand()))["pythonpath"] == ["as/before"]


def test_factories_and_classes_of_a_script_work(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import gymnasium
            from rlmesh_ray.envs.commands import ResetCommand
            from rlmesh_ray.envs.env_source import make_source
            from rlmesh_ray.envs.worker_process import WorkerProcess
            from rlmesh_ray.spaces.validation import ValidationMode

            class Mine(gymnasium.Wrapper):
                pass

            def make():
                return Mine(gymnasium.make("CartPole-v1"))

            if __name__ != "__main__":
                raise SystemExit("imported by the worker")
            worker = WorkerProcess.start(make_source(make, 2), validation=ValidationMode.WARN)
            worker.submit(ResetCommand())
            print(type(worker.receive()).__name__, worker.contract.num_envs)
            worker.close(5.0)
        """)
    )

    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == "ResetReply 2\n"


# --- several workers in a process ----------------------------------------------------------


def start_beside(worker: WorkerProcess, env: EnvLike, num_envs: int = 1) -> WorkerProcess:
    process = worker.join(2)
    assert process is not None
    source = make_source(env, num_envs)
    return WorkerProcess.start(source, validation=ValidationMode.WARN, process=process)


def test_workers_of_a_process_step_as_if_alone_and_it_ends_with_the_last(start: Start) -> None:
    first = start("CartPole-v1", 2)
    second = start_beside(first, "CartPole-v1", 2)
    alone = start("CartPole-v1", 2)
    assert first.pid == second.pid != alone.pid
    assert first.join(2) is None, "the process has no room for a third"

    for worker, seed in ((first, 1), (second, 2), (alone, 2)):
        ask(worker, ResetCommand(seeds=(seed, seed)))
    for action in (0, 1, 1):
        for worker in (first, second, alone):
            assert isinstance(step(worker, np.full(2, action)), StepReply)
    assert_identical(second.buffers.observations, alone.buffers.observations)
    first.close(5.0)

    assert isinstance(step(second, np.zeros(2, np.int64)), StepReply)
    second.close(5.0)
    assert not exists(second.pid)


def test_a_start_that_fails_leaves_the_other_worker_of_its_process(start: Start) -> None:
    first = start("CartPole-v1")

    with pytest.raises(EnvStartError, match="Did you mean: `CartPole`"):
        start_beside(first, "CartPol-v1")

    assert isinstance(ask(first, ResetCommand()), ResetReply)
    again = start_beside(first, "CartPole-v1")
    assert again.pid == first.pid
    again.kill()


def test_the_end_of_an_environment_is_waited_for_although_its_process_goes_on(
    start: Start, tmp_path: Path
) -> None:
    gate, closed = tmp_path / "gate", tmp_path / "closed"
    os.mkfifo(gate)

    class Closing(EchoEnv):
        def close(self) -> None:
            closed.write_text(gate.read_text())

    first = start(lambda: Closing(SPACES["box"]))
    second = start_beside(first, "CartPole-v1")
    opening = threading.Thread(target=gate.write_text, args=("in order",))
    opening.start()

    first.close(20.0)

    opening.join()
    assert closed.read_text() == "in order"
    assert not second.is_stuck
    assert isinstance(ask(second, ResetCommand()), ResetReply)
    second.kill()


def test_a_process_whose_environment_does_not_end_in_time_takes_no_further_worker(
    start: Start, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    class Hanging(EchoEnv):
        def close(self) -> None:
            gate.read_text()

    first = start(lambda: Hanging(SPACES["box"]))
    place = first.join(2)
    assert place is not None

    first.close(0.05)

    assert place.is_stuck
    assert place.join(9) is None
    place.end(0.0, spares_others=True)
    assert not exists(first.pid)


def test_a_place_that_gets_no_environment_is_given_back(start: Start) -> None:
    first = start("CartPole-v1")
    place = first.join(2)
    assert place is not None

    place.end(0.05, spares_others=True)

    assert isinstance(ask(first, ResetCommand()), ResetReply)


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "crashed"])
def test_what_ends_a_process_ends_each_of_its_workers(start: Start, is_killed: bool) -> None:
    first = start(lambda: FaultyEnv(Fault.SEGFAULT, at_step=1))
    second = start_beside(first, "CartPole-v1")
    ask(first, ResetCommand())
    if is_killed:
        first.kill()
    else:
        assert isinstance(step(first, np.zeros(1, np.int64)), Failure)

    failure = ask(second, ResetCommand())

    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.CRASHED
    assert ("together with another session's" in failure.message) is is_killed
    assert not exists(second.pid)


# --- the process -----------------------------------------------------------------------------


def test_the_worker_has_nothing_of_the_endpoint_in_it_and_no_standard_input(start: Start) -> None:
    class Asking(EchoEnv):
        def reset(self, **kwargs: Any) -> Any:
            first, _ = super().reset(**kwargs)
            return first, {"modules": " ".join(sys.modules), "arguments": sys.argv[1:]}

        def step(self, action: Any) -> Any:
            return input()

    worker = start(lambda: Asking(SPACES["discrete"]))

    infos = infos_of(ask(worker, ResetCommand()))
    reply = step(worker, np.array([0]))

    modules = set(infos["modules"][0].split())
    assert "gymnasium" in modules
    assert not modules & {"asyncio", "google.protobuf", "grpc", "ray", "torch"}
    assert infos["arguments"][0] == []
    assert isinstance(reply, Failure)
    assert reply.message.startswith("EOFError")


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux only")
def test_the_worker_does_not_take_the_processor_from_who_wakes_it(cart_pole: WorkerProcess) -> None:
    assert os.sched_getscheduler(cart_pole.pid) == os.SCHED_BATCH


def test_what_the_environment_prints_goes_to_standard_error(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    worker = start(lambda: FaultyEnv(Fault.PRINT))
    ask(worker, ResetCommand())

    step(worker, np.array([0]))

    captured = capfd.readouterr()
    assert captured.out == ""
    assert "printed by the environment" in captured.err


def test_ctrl_c_is_left_to_the_parent(cart_pole: WorkerProcess) -> None:
    os.kill(cart_pole.pid, signal.SIGINT)

    assert isinstance(ask(cart_pole, ResetCommand()), ResetReply)


def test_closing_closes_the_environment(start: Start, tmp_path: Path) -> None:
    class Closing(EchoEnv):
        def close(self) -> None:
            (tmp_path / "closed").touch()

    worker = start(lambda: Closing(SPACES["box"]))

    worker.close(timeout_s=20.0)

    assert (tmp_path / "closed").exists()


class Simulating(EchoEnv):
    """Starts simulators: in the worker's process group, in its own session, and as a daemon."""

    def __init__(self) -> None:
        super().__init__(SPACES["box"])
        command = ["sleep", "1000"]
        plain = subprocess.Popen(command)
        apart = subprocess.Popen(command, start_new_session=True)
        detach = "setsid sleep 1000 >/dev/null & echo $!"
        daemon = subprocess.run(["sh", "-c", detach], stdout=subprocess.PIPE, check=True)
        self.pids = [plain.pid, apart.pid, int(daemon.stdout)]

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(options={"pids": self.pids})


def parent_of(pid: int) -> int:
    return psutil.Process(pid).ppid()


@pytest.mark.skipif(sys.platform != "linux", reason="processes have guards on Linux only")
@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda worker: worker.kill(), id="killed by the endpoint"),
        pytest.param(lambda worker: worker.close(20.0), id="closed"),
        pytest.param(lambda worker: os.kill(worker.pid, signal.SIGKILL), id="crashed"),
        pytest.param(
            lambda worker: os.kill(parent_of(worker.pid), signal.SIGKILL), id="without a guard"
        ),
        pytest.param(
            lambda worker: os.kill(parent_of(parent_of(worker.pid)), signal.SIGKILL),
            id="without the other guard",
        ),
    ],
)
def test_all_that_the_environment_has_started_ends_with_the_worker(
    start: Start, end: Callable[[WorkerProcess], None]
) -> None:
    worker = start(Simulating)
    pids = infos_of(ask(worker, ResetCommand()))["pids"][0]
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as other:
        end(worker)

        have_ended = [wait_for_end(pid) for pid in (worker.pid, *pids)]
        is_spared = other.poll() is None
        other.kill()

    assert all(have_ended)
    assert is_spared


def test_how_a_worker_has_ended_is_told_although_simulators_live_on(start: Start) -> None:
    class Exiting(Simulating):
        def reset(self, **kwargs: Any) -> Any:
            os._exit(3)

    failure = ask(start(Exiting), ResetCommand())

    assert isinstance(failure, Failure)
    assert failure.message.endswith("ended with exit code 3")


@pytest.mark.skipif(sys.platform != "linux", reason="processes have guards on Linux only")
def test_all_that_the_environment_has_started_ends_with_the_endpoint() -> None:
    script = """
import signal
from rlmesh_ray.envs.commands import ResetCommand
from rlmesh_ray.envs.env_source import make_source
from rlmesh_ray.envs.worker_process import WorkerProcess
from rlmesh_ray.spaces.validation import ValidationMode
from tests.loopback.test_worker_process import Simulating

worker = WorkerProcess.start(make_source(Simulating), validation=ValidationMode.WARN)
worker.submit(ResetCommand())
print(worker.pid, *worker.receive().infos["pids"][0], flush=True)
signal.pause()
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as endpoint:
        assert endpoint.stdout is not None
        pids = [int(pid) for pid in endpoint.stdout.readline().split()]

        endpoint.kill()

    assert len(pids) == 4
    assert all(wait_for_end(pid) for pid in pids)


def test_ending_twice_is_harmless(start: Start) -> None:
    worker = start("CartPole-v1")

    for _ in range(2):
        worker.close(20.0)
    for _ in range(2):
        worker.kill()

    assert not worker.is_alive
    assert arrives(worker.channel, 0.0)
    assert isinstance(ask(worker, ResetCommand()), Failure)


@pytest.mark.slow
def test_cycles_leak_neither_descriptors_nor_processes() -> None:
    source = make_source("CartPole-v1")
    before = set(os.listdir("/proc/self/fd"))
    pids = []

    for cycle in range(6):
        worker = WorkerProcess.start(source, validation=ValidationMode.WARN)
        pids.append(worker.pid)
        ask(worker, ResetCommand())
        worker.kill() if cycle % 2 else worker.close(20.0)
    del worker

    assert set(os.listdir("/proc/self/fd")) <= before  # what others have left may be closed
    assert not any(exists(pid) for pid in pids)


def test_a_failed_start_keeps_its_traceback_and_leaks_no_descriptors() -> None:
    before = set(os.listdir("/proc/self/fd"))

    with pytest.raises(EnvStartError) as caught:
        WorkerProcess.start(make_source("CartPol-v1"), validation=ValidationMode.WARN)

    assert "NameNotFound" in caught.value.traceback_text
    assert set(os.listdir("/proc/self/fd")) <= before  # what others have left may be closed


@pytest.mark.parametrize(("name", "num_made"), [("eventfd", 0), ("eventfd", 1), ("dup", 0)])
def test_a_direct_connection_that_descriptors_run_out_for_keeps_none(
    cart_pole: WorkerProcess, name: str, num_made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = getattr(os, name)
    made: list[int] = []

    def make_few(*args: int) -> int:
        if len(made) == num_made:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made.append(make(*args))
        return made[-1]

    monkeypatch.setattr(os, name, make_few)
    before = sorted(os.listdir("/proc/self/fd"))

    with pytest.raises(OSError, match="Too many open files"):
        cart_pole.open_direct_shared_memory()

    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("fault", ["too few", "no memory", "no TCP"])
def test_a_direct_connection_that_a_worker_cannot_take_is_refused_and_leaves_nothing(
    cart_pole: WorkerProcess, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = cart_pole
    ask(worker, ResetCommand())
    send = socket.send_fds

    def send_wrong(to: Any, data: Any, descriptors: list[int], flags: int) -> int:
        direct, *memory = descriptors
        # Of more than a process has room for, the system gives it the first.
        wrong = descriptors[:2] if fault == "too few" else [direct, direct, *memory[1:]]
        return send(to, data, wrong, flags)

    if fault != "no TCP":
        monkeypatch.setattr(socket, "send_fds", send_wrong)
    held = f"/proc/{worker.pid}/fd"
    before = sorted(os.listdir(held))

    ours, theirs = socket.socketpair()  # no socket that TCP's options fit
    with ours, theirs:
        direct = (
            worker.open_direct_tcp(ours)
            if fault == "no TCP"
            else worker.open_direct_shared_memory()
        )
        reply = ask(
            worker, OpenDirectCommand(tag_arrays=True, num_descriptors=direct.num_descriptors)
        )
        direct.disconnect()

    assert isinstance(reply, Failure)
    assert ("RLIMIT_NOFILE" in reply.message) is (fault == "too few")
    assert sorted(os.listdir(held)) == before
    assert isinstance(step(worker, [1]), StepReply)


def test_workers_die_with_their_parent() -> None:
    # The first waits for a request, the others do not look up.
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT + WAIT, "NAN", "HANG", "SPIN"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(3)]

        parent.kill()

        assert all(wait_for_end(pid) for pid in pids)


def test_the_worker_dies_with_its_parent_although_a_fork_of_that_lives_on() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT + FORK + WAIT, "HANG"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        pid, fork = int(parent.stdout.readline()), int(parent.stdout.readline())

        parent.kill()

        assert wait_for_end(pid)
        os.kill(fork, signal.SIGKILL)


PARENT = textwrap.dedent("""
    import signal, sys
    from rlmesh_ray.envs.commands import ResetCommand, StepCommand
    from rlmesh_ray.envs.env_source import make_source
    from rlmesh_ray.envs.worker_process import WorkerProcess
    from rlmesh_ray.spaces.validation import ValidationMode
    from rlmesh_ray.testing.envs import Fault, FaultyEnv
    from tests.loopback.child_processes import arrives

    workers = []
    for name in sys.argv[1:]:
        source = make_source(FaultyEnv, env_kwargs={"fault": Fault[name]})
        worker = WorkerProcess.start(source, validation=ValidationMode.WARN)
        worker.submit(ResetCommand())
        worker.receive()
        worker.submit(StepCommand())
        arrives(worker.channel, 0.2)
        print(worker.pid, flush=True)
        workers.append(worker)
""")
FORK = textwrap.dedent("""
    import os
    if child := os.fork():
        print(child, flush=True)
""")
WAIT = "signal.pause()"
