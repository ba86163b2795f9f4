"""evaluate() over several real endpoints, some of which die, hang or move."""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from numpy.typing import NDArray

from rlmesh_ray import EnvServer, ModelServer, RemoteModel, RemoteVectorEnv, evaluate
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.compliance.probe import REST, ProbeCommand
from rlmesh_ray.errors import (
    AccessDeniedError,
    ConfigurationError,
    ContractMismatchError,
    EndpointUnreachableError,
    EvaluationInterruptedError,
    RemoteEnvError,
    RemoteModelError,
)
from rlmesh_ray.evaluation.result import EndpointRole, EpisodeResult, EvaluationResult, Loss
from rlmesh_ray.testing.envs import Fault, FaultyEnv
from rlmesh_ray.testing.probe_env import ENV_ID, ProbeEnv
from tests.loopback.client_internals import endpoints_give_up_after
from tests.loopback.eventually import eventually
from tests.loopback.ports import free_address

PROBE = f"{ProbeEnv.__module__}:{ENV_ID}"
SEED = 20


def lean(observations: NDArray[Any]) -> NDArray[np.int64]:
    """Push CartPole's cart under the pole, too late to keep it up for long."""
    return (observations[:, 2] > 0).astype(np.int64)


@functools.cache
def in_process(index: int) -> EpisodeResult:
    """What episode ``index`` must be, even if endpoints are lost."""
    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=SEED + index)
    total, length, terminated, truncated = 0.0, 0, False, False
    while not (terminated or truncated):
        action = int(lean(observation[None])[0])
        observation, reward, terminated, truncated, _ = env.step(action)
        total, length = total + float(reward), length + 1
    return EpisodeResult(index, SEED + index, total, length, terminated, truncated)


class Record:
    """Watches an evaluation, and meddles with it.

    Args:
        meddle: Called once, when ``after`` episodes have ended.
        after: How many.
        on_loss: Called at each loss.
    """

    def __init__(
        self,
        meddle: Callable[[], object] = lambda: None,
        after: int = 3,
        on_loss: Callable[[Loss], object] = lambda _: None,
    ) -> None:
        self.episodes: list[EpisodeResult] = []
        self.losses: list[Loss] = []
        self._meddle = meddle
        self._after = after
        self._on_loss = on_loss
        self._thread = threading.current_thread()

    def episode(self, episode: EpisodeResult) -> None:
        assert threading.current_thread() is self._thread
        self.episodes.append(episode)
        if len(self.episodes) == self._after:
            self._meddle()

    def loss(self, loss: Loss) -> None:
        assert threading.current_thread() is self._thread
        self.losses.append(loss)
        self._on_loss(loss)


def run(env: Any, model: Any, record: Record, episodes: int = 10, **more: Any) -> EvaluationResult:
    return evaluate(
        env,
        model,
        episodes=episodes,
        seed=SEED,
        on_episode=record.episode,
        on_loss=record.loss,
        **more,
    )


def check(result: EvaluationResult, record: Record, episodes: int = 10) -> None:
    """Nothing lost, nothing twice, nothing different."""
    assert list(result.episodes) == [in_process(index) for index in range(episodes)]
    assert sorted(record.episodes, key=lambda episode: episode.index) == list(result.episodes)
    lost = [loss for loss in record.losses if loss.episodes]
    assert result.interruptions == len(lost)
    counts = {(report.role, report.address): report.episodes for report in result.endpoints}
    assert sum(n for (role, _), n in counts.items() if role is EndpointRole.ENV) == episodes


class Held(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole that takes no step before the file ``gate`` is there."""

    def __init__(self, gate: Path) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._gate = gate

    def step(self, action: Any) -> Any:
        assert eventually(self._gate.exists)
        return super().step(action)


class Meddling:
    """A policy that meddles at its fifth call, and then makes a file.

    Beside an environment that waits for the file, ``Held``, this is in the middle of another one's
    episodes, whichever of them begins first.
    """

    def __init__(self, meddle: Callable[[], object], gate: Path) -> None:
        self._meddle = meddle
        self._gate = gate
        self._num_calls = 0

    def __call__(self, observations: NDArray[Any]) -> NDArray[np.int64]:
        self._num_calls += 1
        if self._num_calls == 5:
            self._meddle()
            self._gate.touch()
        return lean(observations)


def meeting(
    barrier: threading.Barrier, then: Callable[[], object] = lambda: None
) -> Callable[[NDArray[Any]], NDArray[np.int64]]:
    """Make a policy that waits at its first call, and does something at its second."""
    first = iter([barrier.wait, then])

    def act(observations: NDArray[Any]) -> NDArray[np.int64]:
        next(first, lambda: None)()
        return lean(observations)

    return act


def workers() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "rlmesh-ray-evaluate"]


@pytest.fixture(scope="module")
def poles() -> Iterator[EnvServer]:
    """Serve several sessions, and all of the file's: no test stops it."""
    with EnvServer("CartPole-v1", num_envs=2) as server:
        yield server


# --- several endpoints -----------------------------------------------------------------


def test_all_endpoints_work_at_once_each_environment_with_a_policy_of_its_own(
    poles: EnvServer,
) -> None:
    # Each policy answers only when the other one has been asked, too.
    barrier = threading.Barrier(2, timeout=30)
    record = Record()
    with (
        EnvServer("CartPole-v1") as second,
        ModelServer(meeting(barrier)) as one,
        ModelServer(meeting(barrier)) as other,
    ):
        addresses = [poles.address, second.address], [one.address, other.address]
        result = run(*addresses, record)

    check(result, record)
    assert [report.role for report in result.endpoints] == [EndpointRole.ENV] * 2 + [
        EndpointRole.MODEL
    ] * 2
    assert {report.address for report in result.endpoints} == {*addresses[0], *addresses[1]}
    assert all(report.episodes and not report.interruptions for report in result.endpoints)
    assert workers() == []


@pytest.mark.slow
def test_open_sessions_are_shared_and_left_open() -> None:
    record = Record()
    with (
        EnvServer("CartPole-v1", num_envs=2) as env_server,
        ModelServer(lean) as model_server,
        RemoteModel(model_server.address) as model,
    ):
        envs = [RemoteVectorEnv(env_server.address) for _ in range(2)]
        result = run(envs, model, record)

        for env in envs:
            env.reset()
            env.close()
        model.configure_route(envs[0])

    check(result, record)


def test_a_function_is_called_once_at_a_time(poles: EnvServer) -> None:
    running = 0
    most = 0

    def count(observations: NDArray[Any]) -> NDArray[np.int64]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        actions = lean(observations)
        running -= 1
        return actions

    record = Record()
    result = run([poles.address] * 2, count, record)

    check(result, record)
    assert most == 1


@pytest.mark.slow
def test_one_environment_calls_the_function_in_the_callers_thread() -> None:
    threads = set()

    def act(observations: NDArray[Any]) -> NDArray[np.int64]:
        threads.add(threading.current_thread())
        return lean(observations)

    with EnvServer("CartPole-v1") as server:
        run(server.address, act, Record(), episodes=1)

    assert threads == {threading.current_thread()}


def probe_action(observation: dict[str, Any], last: int) -> Any:
    """Earn what the seed gives; end after ``last`` steps, or sooner."""
    noise, steps = observation["noise"], int(observation["steps"][0])
    is_over = steps + 1 >= last or noise[0] < 0.2
    return {
        **REST,
        "command": int(ProbeCommand.TRUNCATE if noise[1] < 0.5 else ProbeCommand.TERMINATE)
        * is_over,
        "box": noise.astype(np.float32),
    }


def probe_policy(observations: dict[str, Any]) -> Any:
    rows = [
        probe_action({"noise": noise, "steps": steps}, 6)
        for noise, steps in zip(observations["noise"], observations["steps"], strict=True)
    ]
    batch = {
        key: np.stack([row[key] for row in rows]) for key in rows[0] if key not in ("text", "pair")
    }
    zeros = np.zeros(len(rows), np.int64)
    return {**batch, "text": tuple(row["text"] for row in rows), "pair": (zeros, zeros)}


@pytest.mark.slow
def test_a_nested_environment_gives_what_it_gives_in_process() -> None:
    expected = []
    for index in range(12):
        env = ProbeEnv()
        observation, _ = env.reset(seed=SEED + index)
        total, length, ends = 0.0, 0, (False, False)
        while not any(ends):
            observation, reward, *ends, _ = env.step(probe_action(observation, 6))  # type: ignore[assignment]
            total, length = total + reward, length + 1
        expected.append(EpisodeResult(index, SEED + index, total, length, *ends))

    record = Record()
    with (
        EnvServer(PROBE, num_envs=3) as wide,
        EnvServer(PROBE) as narrow,
        ModelServer(probe_policy) as model,
    ):
        result = run([wide.address, narrow.address], model.address, record, episodes=12)

    assert list(result.episodes) == expected
    assert len({episode.length for episode in expected}) > 1
    assert {episode.truncated for episode in expected} == {True, False}


class Fortunate(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Reports success where the seed is even, as Gymnasium-Robotics does."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._is_even = seed is not None and seed % 2 == 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        *rest, infos = super().step(action)
        return (*rest, {**infos, "is_success": float(self._is_even)})


def fortunate() -> gymnasium.Env[Any, Any]:
    return Fortunate(gymnasium.make("CartPole-v1"))


def fortunate_vector() -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    return gymnasium.vector.SyncVectorEnv(
        [fortunate] * 2, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP
    )


@pytest.mark.parametrize(
    ("env", "num_envs"),
    [
        pytest.param(fortunate, 1, marks=pytest.mark.slow),
        (fortunate, 3),
        pytest.param(fortunate_vector, 1, marks=pytest.mark.slow),
    ],
)
def test_success_is_counted_where_the_environment_reports_it(env: Any, num_envs: int) -> None:
    with EnvServer(env, num_envs=num_envs) as server:
        result = evaluate(server.address, lean, episodes=7, seed=SEED)

    assert [one.success for one in result.episodes] == [i % 2 == 0 for i in range(7)]
    assert result.success_rate == pytest.approx(4 / 7)


class Modest(Fortunate):
    """Reports success, and no failure."""

    def step(self, action: Any) -> Any:
        *rest, infos = super().step(action)
        return (*rest, infos if infos["is_success"] else {})


def modest() -> gymnasium.Env[Any, Any]:
    return Modest(gymnasium.make("CartPole-v1"))


def test_episodes_that_report_nothing_count_and_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with EnvServer(modest) as server:
        result = evaluate(server.address, lean, episodes=4, seed=0)

    assert (result.success_rate, result.success_reports) == (0.5, 2)
    (warning,) = [each for each in caplog.records if each.name == "rlmesh_ray.evaluation.run"]
    assert "2 of 4 episodes report neither success nor failure" in warning.getMessage()


# --- losses ----------------------------------------------------------------------------


@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_an_environment_that_dies_costs_no_episode(width: int, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with (
        EnvServer("CartPole-v1", num_envs=width) as mortal,
        EnvServer(lambda: Held(gate), num_envs=width) as other,
    ):
        record = Record()
        policy = Meddling(lambda: mortal.stop(0.0), gate)
        result = run([mortal.address, other.address], policy, record)

    check(result, record)
    assert {loss.address for loss in record.losses} == {mortal.address}


def test_an_endpoint_that_comes_back_is_used_again() -> None:
    with ExitStack() as stack:
        address = free_address()
        server = stack.enter_context(EnvServer("CartPole-v1", num_envs=2, address=address))
        record = Record(
            lambda: server.stop(0.0),
            on_loss=lambda _: stack.enter_context(
                EnvServer("CartPole-v1", num_envs=2, address=address)
            ),
        )

        result = run(address, lean, record)

    check(result, record)
    assert result.interruptions == 1
    assert len(record.losses) == 1


@pytest.mark.slow
def test_a_fleet_is_asked_again_where_its_endpoint_is() -> None:
    class Fleet:
        token = "s3cret"

        def __init__(self) -> None:
            self.servers = [EnvServer("CartPole-v1", token=self.token).start()]

        @property
        def resolver(self) -> "Fleet":
            return self

        def __len__(self) -> int:
            return 1

        def address(self, _index: int) -> str:
            return self.servers[-1].address

    fleet = Fleet()
    record = Record(
        lambda: fleet.servers[-1].stop(0.0),
        on_loss=lambda _: fleet.servers.append(EnvServer("CartPole-v1", token="s3cret").start()),
    )

    result = run(fleet, lean, record)

    check(result, record)
    assert {report.address for report in result.endpoints} == {
        server.address for server in fleet.servers
    }
    fleet.servers[-1].stop()


def test_a_policy_that_dies_costs_no_episode(poles: EnvServer) -> None:
    barrier, is_stopped = threading.Barrier(2, timeout=30), threading.Event()

    def stop_the_mortal() -> None:
        mortal.stop(0.0)
        is_stopped.set()

    with (
        # It is asked for the second time before it dies, and does not answer: else it might have
        # finished its part by then, and it would not be missed.
        ModelServer(meeting(barrier, then=lambda: is_stopped.wait(30))) as mortal,
        ModelServer(meeting(barrier, then=stop_the_mortal)) as other,
    ):
        record = Record()
        result = run([poles.address] * 2, [mortal.address, other.address], record)

    check(result, record)
    assert {(loss.role, loss.address) for loss in record.losses} == {
        (EndpointRole.MODEL, mortal.address)
    }
    assert sum(r.episodes for r in result.endpoints if r.role is EndpointRole.MODEL) == 10


@pytest.mark.slow
def test_a_lost_policy_alone_is_waited_for() -> None:
    with ExitStack() as stack:
        env = stack.enter_context(EnvServer("CartPole-v1", num_envs=2))
        address = free_address()
        model = stack.enter_context(ModelServer(lean, address=address))
        record = Record(
            lambda: model.stop(0.0),
            on_loss=lambda _: stack.enter_context(ModelServer(lean, address=address)),
        )

        result = run(env.address, address, record)

    check(result, record)


@contextmanager
def process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serve CartPole from another process; return it and the address."""
    with subprocess.Popen(
        [sys.executable, "-m", "rlmesh_ray", "serve-env", "CartPole-v1", "--num-envs=2", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        try:
            yield server, json.loads(server.stdout.readline())["address"]
        finally:
            server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_frozen_costs_no_episode(
    number: signal.Signals, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with process() as (mortal, address), EnvServer(lambda: Held(gate), num_envs=2) as other:
        record = Record()
        policy = Meddling(lambda: os.kill(mortal.pid, number), gate)
        result = run(
            [address, other.address], policy, record, step_timeout_s=5.0, reset_timeout_s=5.0
        )

    check(result, record)
    assert {loss.address for loss in record.losses} == {address}


def test_an_environment_that_hangs_once_is_asked_once_more() -> None:
    commands = iter([ProbeCommand.GO_ON, ProbeCommand.SLEEP])

    def act(observations: dict[str, Any]) -> Any:
        actions = probe_policy(observations)
        command = next(commands, None)
        if command is not None:
            actions["command"][:] = command
        if command is ProbeCommand.SLEEP:  # no other step is hurried
            stack.enter_context(endpoints_give_up_after(450))
        return actions

    record = Record(on_loss=lambda _: stack.close())
    with ExitStack() as stack, EnvServer(PROBE, num_envs=2) as server:
        result = run(server.address, act, record, episodes=4)

    assert [loss.episodes for loss in record.losses] == [(0, 1)]
    assert "TIMEOUT" in record.losses[0].cause
    assert [episode.index for episode in result.episodes] == [0, 1, 2, 3]


# --- ends ------------------------------------------------------------------------------


def test_without_an_endpoint_left_the_finished_episodes_are_kept() -> None:
    with EnvServer("CartPole-v1", num_envs=2) as server:
        record = Record(lambda: server.stop(0.0), after=4)
        with pytest.raises(EvaluationInterruptedError) as caught:
            run(server.address, lean, record, reconnect_timeout_s=0.2)

    finished = list(caught.value.episodes)
    assert len(finished) >= 4
    assert finished == sorted(record.episodes, key=lambda episode: episode.index)
    assert all(episode == in_process(episode.index) for episode in finished)
    assert server.address in str(caught.value)
    assert f"{len(finished)} of 10 episodes" in str(caught.value)
    assert server.address in caught.value.causes[0]


@pytest.mark.slow
def test_where_no_policy_is_left_it_says_so() -> None:
    with EnvServer("CartPole-v1") as env, ModelServer(lean) as model:
        record = Record(lambda: model.stop(0.0))
        with pytest.raises(EvaluationInterruptedError, match="no endpoint of the model is left"):
            run(env.address, model.address, record, reconnect_timeout_s=0.2)


@pytest.mark.slow
def test_an_open_session_that_breaks_is_not_opened_again() -> None:
    with EnvServer("CartPole-v1") as server:
        env = RemoteVectorEnv(server.address)
        record = Record(lambda: server.stop(0.0))
        with pytest.raises(EvaluationInterruptedError) as caught:
            run(env, lean, record)
        env.close()

    assert len(caught.value.episodes) >= 3


@pytest.mark.slow
def test_an_episode_that_kills_its_endpoints_is_given_up() -> None:
    with (
        EnvServer(lambda: FaultyEnv(Fault.EXIT, at_step=3)) as server,
        pytest.raises(EvaluationInterruptedError, match="episode 0 was interrupted 6 times"),
    ):
        evaluate(server.address, lean_on_nothing, episodes=2)


def test_episodes_that_are_interrupted_side_by_side_are_all_named() -> None:
    with (
        EnvServer(lambda: FaultyEnv(Fault.EXIT, at_step=3), num_envs=2) as server,
        pytest.raises(
            EvaluationInterruptedError, match="episodes 0 and 1 were interrupted 6 times"
        ),
    ):
        evaluate(server.address, lean_on_nothing, episodes=2)


def lean_on_nothing(observations: NDArray[Any]) -> NDArray[np.int64]:
    return np.zeros(len(observations), np.int64)


def test_an_environment_that_raises_ends_it_at_once() -> None:
    with (
        EnvServer(lambda: FaultyEnv(Fault.RAISE, at_step=3)) as broken,
        pytest.raises(RemoteEnvError, match="the environment is broken"),
    ):
        evaluate([broken.address] * 2, lean_on_nothing, episodes=5)

    assert workers() == []


@pytest.mark.slow
def test_a_policy_that_cannot_act_there_ends_it_at_once() -> None:
    with (
        EnvServer("Pendulum-v1") as env,
        ModelServer(lambda observations: observations) as model,
        pytest.raises((RemoteModelError, ContractMismatchError)),
    ):
        evaluate([env.address] * 2, model.address, episodes=5)


@pytest.mark.slow
def test_different_environments_are_not_mixed() -> None:
    with (
        EnvServer("CartPole-v1") as one,
        EnvServer("CartPole-v0") as other,
        pytest.raises(ContractMismatchError, match="CartPole-v0"),
    ):
        evaluate([one.address, other.address], lean, episodes=50)


@pytest.mark.slow
def test_a_wrong_token_ends_it_at_once() -> None:
    with (
        EnvServer("CartPole-v1") as server,
        EnvServer("CartPole-v1", token="s3cret") as closed,
        pytest.raises(AccessDeniedError),
    ):
        evaluate([server.address, closed.address], lean, episodes=500)


@pytest.mark.slow
def test_a_dial_reaches_what_an_address_does_not() -> None:
    record = Record()
    with (
        EnvServer("CartPole-v1", token="s3cret") as closed,
        EnvServer("CartPole-v1", token="other") as other,
    ):
        result = run(
            [ConnectOptions(closed.address, "s3cret"), other.address], lean, record, token="other"
        )

    check(result, record)


@pytest.mark.slow
def test_an_endpoint_that_was_never_there_does_not_stop_the_others() -> None:
    record = Record()
    with EnvServer("CartPole-v1") as server:
        result = run(["127.0.0.1:1", server.address], lean, record, episodes=5)

    check(result, record, episodes=5)
    assert [(loss.address, loss.episodes) for loss in record.losses] in ([], [("127.0.0.1:1", ())])


def test_where_none_is_there_it_is_reported_at_once_and_once() -> None:
    record = Record()
    with pytest.raises(EndpointUnreachableError, match=r"127.0.0.1:1: nothing answers"):
        run("127.0.0.1:1", lean, record)
    assert record.losses == []
    with pytest.raises(EvaluationInterruptedError, match=r"127.0.0.1:1: nothing answers"):
        evaluate(["127.0.0.1:1", "127.0.0.1:2"], lean, episodes=1)


def test_a_watcher_may_stop_it(poles: EnvServer) -> None:
    def stop() -> None:
        raise EndpointUnreachableError("of my own")

    for endpoints in (poles.address, [poles.address] * 2):
        with pytest.raises(EndpointUnreachableError, match="of my own"):
            run(endpoints, lean, Record(stop))

    assert workers() == []


def test_a_function_that_cannot_reach_its_own_server_is_no_lost_environment(
    poles: EnvServer,
) -> None:
    def act(_observations: Any) -> Any:
        raise EndpointUnreachableError("of my own")

    record = Record()
    with pytest.raises(EndpointUnreachableError, match="of my own"):
        run(poles.address, act, record)

    assert record.losses == []


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"step_timeout_s": 0.0}, "step_timeout_s"),
        ({"on_loss": 3}, "on_loss=3 cannot be called"),
        ({"reconnect_timeout_s": -1.0}, "reconnect_timeout_s"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        evaluate("127.0.0.1:1", lean, episodes=1, **options)


@pytest.mark.parametrize("endpoints", [[], 7, [None]])
def test_what_is_no_endpoint_is_refused(endpoints: Any) -> None:
    with pytest.raises(ConfigurationError, match="environment"):
        evaluate(endpoints, lean, episodes=1)
