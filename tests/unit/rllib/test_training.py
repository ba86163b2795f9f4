import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.rllib.config.presets import algorithm_config
from rlmesh_ray.rllib.training import TrainingProgress, _RecentReturns, learning_curve, train


def test_the_mean_return_needs_more_than_a_lucky_episode() -> None:
    returns = _RecentReturns()

    assert math.isnan(returns.add(0, math.nan))
    assert returns.add(30, 100.0) == 100.0
    assert returns.add(1, 500.0) == pytest.approx((30 * 100 + 500) / 31)
    assert returns.add(0, math.nan) == pytest.approx((30 * 100 + 500) / 31)


def test_the_mean_return_forgets_what_it_does_not_need() -> None:
    returns = _RecentReturns()
    returns.add(20, 10.0)
    returns.add(20, 20.0)

    assert returns.add(16, 30.0) == pytest.approx((20 * 20 + 16 * 30) / 36)
    assert returns.add(100, 50.0) == 50.0


def test_a_training_needs_a_goal() -> None:
    with pytest.raises(ConfigurationError, match="stop_return, stop_iters or stop_timesteps"):
        next(train(algorithm_config("PPO")))


def test_an_interrupted_training_ends_after_its_iteration_with_a_checkpoint(tmp_path: Path) -> None:
    saved: list[str] = []
    algorithm = SimpleNamespace(train=dict, save_to_path=saved.append, stop=lambda: None)
    config: Any = SimpleNamespace(build_algo=lambda: algorithm)
    asked = iter([False, True])

    history = list(
        train(config, stop_iters=9, checkpoint_dir=tmp_path, is_interrupted=lambda: next(asked))
    )

    assert len(history) == 2
    assert saved == [str(tmp_path)]


def test_progress_has_the_first_failure_that_truncated_episodes_of_a_runner() -> None:
    asked = []

    def foreach_env_runner(ask: Any, **_: Any) -> list[Any]:
        asked.append(ask)
        other = SimpleNamespace(first_failure="")
        failing = SimpleNamespace(first_failure="lane 3: it gave nan")
        return [ask(runner) for runner in (SimpleNamespace(), other, failing)]

    cut = iter([0, 2, 4])
    algorithm = SimpleNamespace(
        train=lambda: {"env_runners": {"num_episodes_interrupted_lifetime": next(cut)}},
        env_runner_group=SimpleNamespace(foreach_env_runner=foreach_env_runner),
        stop=lambda: None,
    )
    config: Any = SimpleNamespace(build_algo=lambda: algorithm)

    history = list(train(config, stop_iters=3))

    reported = "lane 3: it gave nan"
    assert [progress.first_failure for progress in history] == ["", reported, reported]
    assert len(asked) == 1


def test_an_unknown_algorithm_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"'A2C' is not one of APPO, DQN, IMPALA, PPO"):
        algorithm_config("A2C")


@pytest.mark.parametrize("name", ["APPO", "DQN", "IMPALA", "PPO", "SAC", "ppo"])
def test_algorithms_are_found_by_name(name: str) -> None:
    assert algorithm_config(name).algo_class.__name__ == name.upper()


def test_the_learning_curve_is_a_picture(tmp_path: Path) -> None:
    points = [TrainingProgress(n, 100 * n, 10.0, float(n), n, n / 2, 0) for n in range(1, 4)]

    learning_curve(points, tmp_path / "curve.png", title="a title", goal=2.0)

    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
