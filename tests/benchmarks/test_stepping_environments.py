from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest

from benchmarks.stepping import environments
from benchmarks.stepping.catch_game import ROWS, CatchGame
from benchmarks.stepping.environments import Stragglers, environment, local_vector
from benchmarks.stepping.specs import CATCH, FRAMES, STRAGGLERS


def test_frames_are_copies_without_other_owners() -> None:
    env = gymnasium.make(FRAMES, shape=(3, 3), step_s=0.0)
    first, _ = env.reset()
    first[:] = 0
    shown = [env.step(np.int64(0))[0] for _ in range(8)]

    assert shown[-1].any()
    assert not np.array_equal(shown[0], shown[1])


def test_a_game_of_catch_takes_as_many_steps_as_the_board_has_rows_below_the_first() -> None:
    env = gymnasium.make(CATCH)
    board, _ = env.reset(seed=1)
    steps = [env.step(np.int64(1)) for _ in range(ROWS - 1)]

    assert board.shape == (10, 5)
    assert [terminated for _, _, terminated, _, _ in steps] == [False] * (ROWS - 2) + [True]
    assert abs(float(steps[-1][1])) == 1.0


def test_a_paddle_below_the_ball_catches_it() -> None:
    game = CatchGame(0)
    ball = int(np.argmax(game.begin()[0]))

    rewards = [
        game.move(int(np.sign(ball - 2)) if step < abs(ball - 2) else 0) for step in range(9)
    ]

    assert rewards[-1][1:] == (1.0, True)


def test_one_step_in_a_hundred_straggles(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(environments, "time", SimpleNamespace(sleep=waited.append))
    venv = Stragglers(8)
    venv.reset()

    for _ in range(300):
        venv.step(np.zeros(8, np.int64))

    slow = [index for index, seconds in enumerate(waited) if seconds > 0.01]
    assert [index // 100 for index in slow] == [0, 1, 2]
    assert sum(waited) == pytest.approx(3 * (99 * 1e-3 + 50e-3))


def test_an_endpoint_hosts_an_id_or_a_factory_of_lanes() -> None:
    assert environment(FRAMES, 1) == FRAMES
    assert environment(STRAGGLERS, 8) is Stragglers


def test_the_same_lanes_are_there_in_one_process() -> None:
    venv = local_vector(FRAMES, 3, {"shape": (5,), "step_s": 0.0}, has_processes=False)

    observations, _ = venv.reset()

    assert isinstance(venv, gymnasium.vector.SyncVectorEnv)
    assert observations.shape == (3, 5)
