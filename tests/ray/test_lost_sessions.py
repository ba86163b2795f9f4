"""What a runner makes of sessions that break, hang or come back elsewhere, and of slow ones."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rlmesh_ray.actors import EnvFleet
from rlmesh_ray.errors import ConformanceError
from rlmesh_ray.rllib import RLMeshEnvRunner, configure
from rlmesh_ray.rllib.runner.session_recovery import INTERRUPTED_KEY, LIFETIME_SUMS
from tests.loopback.eventually import eventually
from tests.loopback.test_cli import started
from tests.ray.lost_endpoints import Background, Fleet, Steps, assert_unbroken
from tests.ray.ramps import Ladder, Stairs

pytestmark = pytest.mark.usefixtures("local_ray")


def test_an_endpoint_s_death_costs_no_transition_that_has_arrived(
    fleets: Callable[..., Fleet],
) -> None:
    fleet = fleets(Stairs, Stairs)
    runner = fleet.runner()
    before = runner.sample(num_timesteps=20)
    fleet.lose(0)

    during = runner.sample(num_timesteps=20)  # the other one goes on
    fleet.bring_back(0)
    after: list[SingleAgentEpisode] = []
    while len({chunk.id_ for chunk in after if not chunk.is_done}) < 2:
        after += runner.sample(num_timesteps=4)

    chunks = before + during + after
    assert_unbroken(chunks)
    assert sum(map(len, during)) >= 20
    assert runner.get_metrics()["num_episodes_interrupted_lifetime"].peek() == 1
    runner.stop()


def test_an_interrupted_episode_is_returned_as_truncated_with_the_cause(
    fleets: Callable[..., Fleet], tmp_path: Path
) -> None:
    gate, log = tmp_path / "gate", tmp_path / "log"
    gate.touch()
    steps = Steps(log)
    fleet = fleets(lambda: Stairs(gate, log))
    runner = fleet.runner()
    runner.sample(num_timesteps=5)
    sampling = Background(lambda: runner.sample(num_timesteps=30))
    steps.wait_for(12)
    gate.unlink()
    fleet.lose(0)
    gate.touch()
    fleet.bring_back(0)

    first, *others = sampling.result()

    assert first.is_truncated
    assert not first.is_terminated
    assert "session" in first.get_infos(-1)[INTERRUPTED_KEY]
    assert first.get_rewards()[0] == 6  # what came before has been returned before
    assert len(first) + sum(map(len, others)) == 30
    assert_unbroken(others)
    metrics = runner.get_metrics()
    assert metrics["num_episodes"].peek() == 0
    assert metrics["num_env_steps_sampled"].peek() == 35
    assert metrics["num_env_step_failures"].peek() == 1
    runner.stop()


@pytest.mark.parametrize("path", ["fast", pytest.param("per item", marks=pytest.mark.nightly)])
def test_metrics_of_failures_are_0_before_the_first_one(
    fleets: Callable[..., Fleet], path: str
) -> None:
    runner = fleets(Stairs).runner()
    if path == "per item":
        runner.config.callbacks_on_episode_step = lambda **_kwargs: None

    for _ in range(2):  # as in two iterations
        runner.sample(num_timesteps=4)
        metrics = runner.get_metrics()
        assert [metrics[name].peek() for name in LIFETIME_SUMS] == [0, 0, 0]
    runner.stop()


def test_a_session_that_is_lost_looks_its_endpoint_up_before_it_dials(
    fleets: Callable[..., Fleet], caplog: pytest.LogCaptureFixture
) -> None:
    fleet = fleets(Stairs)
    runner = fleet.runner()
    runner.sample(num_timesteps=4)
    fleet.lose(0)
    fleet.bring_back(0)

    chunks = runner.sample(num_timesteps=8)

    assert_unbroken(chunks)
    lost, regained = caplog.records  # no attempt fails
    assert "a new session is opened; the runner gives up in 120 s" in lost.getMessage()
    address = fleet.board.addresses[0]
    assert f"lane 0: a new session is open at {address}" in regained.getMessage()
    assert lost.levelname == regained.levelname == "WARNING"
    runner.stop()


def _sample_for_ever(runner: Any) -> None:
    while True:
        runner.sample(num_timesteps=4)


def test_a_defect_while_a_session_is_reopened_is_raised_by_sample(
    fleets: Callable[..., Fleet],
) -> None:
    fleet = fleets(Stairs, Stairs)
    runner = fleet.runner()
    runner.sample(num_timesteps=4)
    fleet.board.faults.append(KeyError("a defect"))
    fleet.lose(0)
    fleet.bring_back(0)
    with pytest.raises(KeyError, match="a defect"):
        _sample_for_ever(runner)

    chunks: list[SingleAgentEpisode] = []
    while len({chunk.id_ for chunk in chunks}) < 2:
        chunks += runner.sample(num_timesteps=8)

    assert_unbroken(chunks)
    runner.stop()


def test_whole_episodes_are_whole_in_spite_of_a_loss(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(*[lambda: Stairs(length=4)] * 2)
    runner = fleet.runner()
    runner.sample(num_episodes=2)
    fleet.lose(1)

    episodes = runner.sample(num_episodes=5)

    assert [len(episode) for episode in episodes] == [4] * 5
    assert all(episode.is_terminated for episode in episodes)
    runner.stop()


def test_a_remote_runner_returns_what_it_has_when_all_endpoints_are_away(
    fleets: Callable[..., Fleet],
) -> None:
    fleet = fleets(Stairs)
    runner = fleet.runner(worker_index=1, sample_timeout_s=0.2)
    whole = runner.sample(num_timesteps=7)
    fleet.lose(0)

    nothing = runner.sample(num_timesteps=7)
    fleet.bring_back(0)
    again: list[SingleAgentEpisode] = []
    while sum(map(len, again)) < 7:
        again += runner.sample(num_timesteps=7)

    assert sum(map(len, whole)) == 7
    assert nothing == []
    assert_unbroken(again)
    runner.stop()


@pytest.mark.parametrize("num_endpoints", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_after_an_error_of_a_callback_sampling_begins_anew(
    fleets: Callable[..., Fleet], num_endpoints: int
) -> None:
    runner = fleets(*[Stairs] * num_endpoints).runner()
    runner.sample(num_timesteps=4)
    runner.config.callbacks_on_episode_step = lambda **_kwargs: 1 // 0
    with pytest.raises(ZeroDivisionError):
        runner.sample(num_timesteps=4)
    runner.config.callbacks_on_episode_step = None

    chunks = runner.sample(num_timesteps=12)

    assert sum(map(len, chunks)) == 12
    assert {chunk.get_rewards()[0] for chunk in chunks} == {1.0}
    assert_unbroken(chunks)
    runner.stop()


def test_actions_that_do_not_fit_are_refused_each_time(fleets: Callable[..., Fleet]) -> None:
    runner = fleets(Stairs).runner()
    runner._module_to_env = lambda **_kwargs: {"actions": np.array(["left"])}

    for _ in range(2):
        with pytest.raises(ConformanceError):
            runner.sample(num_timesteps=4)
    runner.stop()


def test_a_slow_session_does_not_delay_the_other_sessions(
    fleets: Callable[..., Fleet], tmp_path: Path
) -> None:
    gate, log = tmp_path / "gate", tmp_path / "log"
    steps = Steps(log)
    runner = fleets(lambda: Stairs(gate), lambda: Stairs(log=log)).runner()
    sampling = Background(lambda: runner.sample(num_timesteps=20))
    steps.wait_for(19)
    gate.touch()

    chunks = sampling.result()

    assert sorted(map(len, chunks)) == [1, 19]
    assert_unbroken(chunks)
    runner.stop()


@pytest.mark.slow
@pytest.mark.parametrize("num_sessions", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_an_endpoint_that_is_frozen_with_all_its_processes_is_given_up_in_time(
    num_sessions: int, tmp_path: Path
) -> None:
    serve = ("serve-env", "CartPole-v1", "--num-envs", "2")
    with started(*serve, folder=tmp_path) as (server, serving):
        config = PPOConfig().environment("CartPole-v1")
        config.env_runners(num_envs_per_env_runner=2 * num_sessions, sample_timeout_s=12.0)
        configure(config, serving["address"], step_timeout_s=3.0, reset_timeout_s=3.0)
        runner = RLMeshEnvRunner(config=config, worker_index=1, num_workers=1)
        runner.sample(num_timesteps=8)

        with frozen(server.pid):
            runner.sample(num_timesteps=8)  # returns, since all endpoints are away

        metrics = runner.get_metrics()
        assert metrics["num_episodes_interrupted_lifetime"].peek() == 2 * num_sessions
        while sum(map(len, runner.sample(num_timesteps=8))) < 8:
            pass
        runner.stop()


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """A process and all its children, which do nothing meanwhile."""
    process = psutil.Process(pid)
    processes = [process, *process.children(recursive=True)]
    try:
        for each in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.suspend()
        yield
    finally:
        for each in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.resume()


def test_lanes_that_had_no_turn_return_nothing(fleets: Callable[..., Fleet]) -> None:
    runner = fleets(Stairs, Stairs).runner()

    samples = [runner.sample(num_timesteps=1) for _ in range(6)]

    assert [list(map(len, chunks)) for chunks in samples] == [[1]] * 6
    assert_unbroken([chunk for chunks in samples for chunk in chunks])
    runner.stop()


def test_a_call_reaches_every_lane_and_new_sessions_too(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(Ladder, Ladder)
    runner = fleet.runner()
    runner.sample(num_timesteps=2)

    assert runner.env.unwrapped.call("set_rung", 3) == (0, 0)
    assert rungs(runner.sample(num_timesteps=8)) == {0, 3}  # a step on, the new one
    fleet.lose(0)
    runner.sample(num_timesteps=8)
    runner.env.unwrapped.call("set_rung", 7)
    fleet.bring_back(0)
    runner.sample(num_episodes=0)  # begins anew everywhere

    chunks: list[SingleAgentEpisode] = []
    while len({chunk.id_ for chunk in chunks}) < 2:
        chunks += runner.sample(num_timesteps=4)
    assert rungs(chunks) == {7}
    runner.stop()


def rungs(chunks: list[SingleAgentEpisode]) -> set[float]:
    return {value for chunk in chunks for value in chunk.get_observations()[:, 0].tolist()}


def pid_of(endpoint: Any) -> int:
    """Return an endpoint's process, as soon as it is back."""
    found: list[int] = []

    def is_back() -> bool:
        with contextlib.suppress(ray.exceptions.RayActorError):  # the runner has got on without it
            found.append(int(ray.get(endpoint.describe.remote())["pid"]))
        return bool(found)

    assert eventually(is_back)
    return found[0]


@pytest.mark.slow
def test_killed_endpoints_never_end_the_runner_s_actor() -> None:
    with EnvFleet(Stairs, num_endpoints=2, num_cpus=0.1) as fleet:
        config = PPOConfig().env_runners(num_env_runners=1)
        config = configure(config, fleet)
        runner = ray.remote(RLMeshEnvRunner).remote(config=config, worker_index=1, num_workers=1)
        pid = ray.get(runner.apply.remote(lambda _: os.getpid()))
        chunks = ray.get(runner.sample.remote(num_timesteps=50))
        for kill in range(5):
            victim = pid_of(fleet.actors[kill % 2])
            sampling = runner.sample.remote(num_timesteps=300)
            os.kill(victim, signal.SIGKILL)
            chunks += ray.get(sampling)

        assert ray.get(runner.apply.remote(lambda _: os.getpid())) == pid
        assert_unbroken(chunks)
        ray.get(runner.stop.remote())


@pytest.mark.nightly
def test_recovery_is_measured_and_printed_as_json() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "recovery", "--kills", "2", "--json"],
        capture_output=True, text=True, timeout=280, check=True,
    )  # fmt: skip

    reported = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["kill"] for event in reported if event["event"] == "recovery"] == [1, 2]
    assert reported[-1]["is_complete"]
