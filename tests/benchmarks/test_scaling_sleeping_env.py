from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.scaling import sleeping_env
from benchmarks.scaling.sleeping_env import Simulator


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    durations: list[float] = []
    # Not time.sleep itself, which threads that earlier tests have left running call, too.
    monkeypatch.setattr(sleeping_env, "time", SimpleNamespace(sleep=durations.append))
    return durations


def test_a_step_of_all_lanes_sleeps_once(slept: list[float]) -> None:
    simulator = Simulator(num_envs=8, step_s=0.02)
    simulator.reset()

    simulator.step(np.zeros(8, np.int64))

    assert slept == [0.02]


def test_observations_have_the_size_that_was_asked_for() -> None:
    observation, _ = Simulator(num_envs=3, observation_bytes=4096).reset()

    assert observation.shape[0] == 3
    assert observation[0].nbytes == 4096
    assert observation.dtype == np.float32


@pytest.mark.usefixtures("slept")
def test_observations_are_copies_without_other_owners() -> None:
    simulator = Simulator(num_envs=1)
    first, _ = simulator.reset()
    first[:] = 0.0

    again, _ = simulator.reset()

    assert again.any()


@pytest.mark.usefixtures("slept")
def test_lanes_end_one_after_the_other_and_begin_anew_with_the_next_step() -> None:
    simulator = Simulator(num_envs=2, episode_length=4)
    simulator.reset()

    outcomes = [simulator.step(np.zeros(2, np.int64)) for _ in range(8)]

    ended = np.array([terminated for _, _, terminated, _, _ in outcomes])
    rewards = np.array([reward for _, reward, _, _, _ in outcomes])
    assert ended[:, 0].tolist() == [False, False, False, True, False, False, False, False]
    assert ended[:, 1].tolist() == [False, True, False, False, False, False, True, False]
    np.testing.assert_array_equal(rewards[:, 0], [1, 1, 1, 1, 0, 1, 1, 1])
