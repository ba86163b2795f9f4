"""Catch: what it shows, and what it pays."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from numpy.typing import NDArray

from rlmesh_ray.testing.catch import Catch


def play(seed: int, move: int) -> list[tuple[NDArray[np.float32], float, bool]]:
    """Move in one direction until the ball is down; return what every step gave."""
    env = Catch()
    env.reset(seed=seed)
    steps: list[tuple[NDArray[np.float32], float, bool]] = []
    while not steps or not steps[-1][2]:
        observation, reward, terminated, truncated, _ = env.step(np.int64(move))
        assert not truncated
        steps.append((observation, reward, terminated))
    return steps


def test_it_is_an_environment_as_gymnasium_wants_it() -> None:
    check_env(gymnasium.make("rlmesh_ray/Catch-v0").unwrapped)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("move", [0, 1, 2])
def test_only_a_caught_ball_pays(seed: int, move: int) -> None:
    steps = play(seed, move)

    assert len(steps) == 9
    assert [reward for _, reward, _ in steps[:-1]] == [0.0] * 8
    # In the last picture ball and paddle are in one row: two columns lit, or one if it is caught.
    picture, reward, _ = steps[-1]
    is_caught = (picture[-1] > 0).sum() < 42 // 5 + 2
    assert reward == (1.0 if is_caught else -1.0)


def test_both_outcomes_happen() -> None:
    rewards = {play(seed, 1)[-1][1] for seed in range(20)}

    assert rewards == {1.0, -1.0}


def test_the_ball_falls_a_row_a_step_where_it_began() -> None:
    env = Catch()
    picture, _ = env.reset(seed=3)
    heights = []
    columns = set()
    for _ in range(8):
        ball = picture[: 42 * 9 // 10, :, 0]
        heights.append(int(np.flatnonzero(ball.any(axis=1))[0]))
        columns.add(tuple(np.flatnonzero(ball.any(axis=0))))
        picture, *_ = env.step(np.int64(1))

    assert heights == sorted(set(heights))
    assert len(columns) == 1
