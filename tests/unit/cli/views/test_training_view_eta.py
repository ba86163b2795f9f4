import math
from types import SimpleNamespace
from typing import Any

import pytest

from rlmesh_ray.cli.views.training_view import StopCriteria, eta_s, format_duration


def sample(iteration: int, return_mean: float, wall_s: float) -> Any:
    """Stand-in for the class of rllib.training, which would import Ray."""
    return SimpleNamespace(iteration=iteration, return_mean=return_mean, wall_s=wall_s)


def rising(num: int, per_iteration: float = 10.0, seconds: float = 2.0) -> list[Any]:
    return [sample(index, index * per_iteration, index * seconds) for index in range(1, num + 1)]


def test_nothing_is_known_before_the_first_iteration() -> None:
    assert eta_s([], StopCriteria(stop_return=100.0, stop_iters=10)) is None


def test_remaining_iterations_take_as_long_as_the_finished_ones() -> None:
    assert eta_s(rising(4), StopCriteria(stop_iters=10)) == pytest.approx(6 * 2.0)


def test_a_rising_return_is_extrapolated() -> None:
    assert eta_s(rising(5), StopCriteria(stop_return=100.0)) == pytest.approx((100 - 50) / 5)


def test_two_samples_are_not_extrapolated() -> None:
    assert eta_s(rising(2), StopCriteria(stop_return=100.0)) is None


@pytest.mark.parametrize("per_iteration", [0.0, -3.0])
def test_a_return_that_does_not_rise_is_not_extrapolated(per_iteration: float) -> None:
    assert eta_s(rising(6, per_iteration), StopCriteria(stop_return=100.0)) is None


def test_only_the_last_ten_samples_count() -> None:
    flat = [sample(index, 0.0, float(index)) for index in range(1, 51)]
    steep = [sample(50 + index, 10.0 * index, 50.0 + index) for index in range(1, 11)]

    assert eta_s(flat + steep, StopCriteria(stop_return=200.0)) == pytest.approx(10.0)


def test_samples_without_a_return_are_left_out() -> None:
    unknown = [sample(index, math.nan, float(index)) for index in range(1, 4)]

    assert eta_s(unknown, StopCriteria(stop_return=10.0)) is None
    assert eta_s(unknown + rising(9)[3:], StopCriteria(stop_return=100.0)) == pytest.approx(2.0)


def test_samples_of_one_time_are_not_extrapolated() -> None:
    same = [sample(index, float(index), 1.0) for index in range(1, 5)]

    assert eta_s(same, StopCriteria(stop_return=100.0)) is None


def test_the_nearest_goal_counts() -> None:
    assert eta_s(rising(5), StopCriteria(stop_return=60.0, stop_iters=1000)) == pytest.approx(2.0)
    assert eta_s(rising(5), StopCriteria(stop_return=1e9, stop_iters=6)) == pytest.approx(2.0)


def test_the_time_left_is_never_negative() -> None:
    assert eta_s(rising(5), StopCriteria(stop_return=1.0, stop_iters=2)) == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "?"),
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (125.0, "2 min 05 s"),
        (4200.0, "1 h 10 min"),
    ],
)
def test_durations_have_readable_units(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text
