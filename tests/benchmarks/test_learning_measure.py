"""What is said about learning curves."""

import math
from typing import Any

import pytest
from rich.console import Console

from benchmarks.learning.measure import Comparison, Point, Run, Sampler
from benchmarks.learning.plan import THRESHOLDS, Task
from benchmarks.learning.report import caveats, table

GOAL = THRESHOLDS[Task.PPO_CATCH].stop_return


def run(sampler: Sampler, returns: list[float], *, steps: int = 10, seed: int = 1) -> Run:
    points = tuple(
        Point(number, number * steps, mean, 0.5 * number)
        for number, mean in enumerate(returns, start=1)
    )
    return Run(Task.PPO_CATCH, sampler, seed, points)


def comparison(*runs: Run) -> Comparison:
    return Comparison(Task.PPO_CATCH, runs)


def shown(what: Any) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def test_every_task_has_a_threshold() -> None:
    assert set(THRESHOLDS) == set(Task)


@pytest.mark.parametrize(("last", "is_learnt"), [(GOAL, True), (GOAL - 0.01, False)])
def test_a_run_has_learnt_when_its_last_return_reaches_the_threshold(
    last: float, is_learnt: bool
) -> None:
    assert run(Sampler.OURS, [math.nan, last]).is_learnt == is_learnt


def test_curves_are_the_same_only_to_the_last_digit() -> None:
    curve = [math.nan, 0.5, GOAL]
    ours = run(Sampler.OURS, curve)

    assert ours.has_curve_of(run(Sampler.RLLIB, curve))
    assert not ours.has_curve_of(run(Sampler.RLLIB, [math.nan, 0.5 + 1e-15, GOAL]))
    assert not ours.has_curve_of(run(Sampler.RLLIB, [0.1, 0.5, GOAL]))
    assert not ours.has_curve_of(run(Sampler.RLLIB, curve, steps=11))
    assert not ours.has_curve_of(run(Sampler.RLLIB, curve[:2]))


def test_steps_are_compared_seed_by_seed() -> None:
    found = comparison(
        run(Sampler.OURS, [GOAL], steps=10, seed=1),
        run(Sampler.RLLIB, [GOAL], steps=20, seed=1),
        run(Sampler.RLLIB, [GOAL], steps=10, seed=2),
        run(Sampler.OURS, [GOAL], steps=30, seed=2),
    )

    assert found.steps_ratio == (0.5 + 3.0) / 2
    assert not found.is_same_curve
    assert caveats([found]) == []


def test_who_has_not_learnt_is_named_and_not_compared() -> None:
    found = comparison(run(Sampler.OURS, [0.2]), run(Sampler.RLLIB, [GOAL]))

    assert found.steps_ratio is None
    (caveat,) = caveats([found])
    assert "ppo-catch was not learnt by rlmesh-ray with seed 1: mean return 0.2" in caveat


def test_the_table_shows_both_sides_and_the_verdict() -> None:
    curve = [0.1, GOAL]

    same = shown(table(comparison(run(Sampler.OURS, curve), run(Sampler.RLLIB, curve))))
    other = shown(table(comparison(run(Sampler.OURS, curve), run(Sampler.RLLIB, [GOAL]))))

    assert "rlmesh-ray" in same
    assert "RLlib" in same
    assert "the same curve, to the last digit" in same
    assert "steps through endpoints / RLlib's own: 2.00" in other
