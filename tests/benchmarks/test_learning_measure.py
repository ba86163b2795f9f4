"""What is said about learning curves."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks.learning.measure import Comparison, Note, Point, Run, compare
from benchmarks.learning.plan import THRESHOLDS, LearningPlan, Sampler, Task
from benchmarks.learning.plot import draw, mean_curve
from benchmarks.learning.report import caveats, table

OURS = Sampler.TORCH
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
    assert run(OURS, [math.nan, last]).is_learnt == is_learnt


def test_curves_are_the_same_only_to_the_last_digit() -> None:
    curve = [math.nan, 0.5, GOAL]
    ours = run(OURS, curve)

    assert ours.has_curve_of(run(Sampler.RLLIB, curve))
    assert not ours.has_curve_of(run(Sampler.RLLIB, [math.nan, 0.5 + 1e-15, GOAL]))
    assert not ours.has_curve_of(run(Sampler.RLLIB, [0.1, 0.5, GOAL]))
    assert not ours.has_curve_of(run(Sampler.RLLIB, curve, steps=11))
    assert not ours.has_curve_of(run(Sampler.RLLIB, curve[:2]))


def test_steps_are_compared_seed_by_seed() -> None:
    found = comparison(
        run(OURS, [GOAL], steps=10, seed=1),
        run(Sampler.RLLIB, [GOAL], steps=20, seed=1),
        run(Sampler.RLLIB, [GOAL], steps=10, seed=2),
        run(OURS, [GOAL], steps=30, seed=2),
    )

    assert found.steps_ratio(OURS) == (0.5 + 3.0) / 2
    assert not found.is_same_curve(OURS)
    assert caveats([found]) == []


def test_who_has_not_learnt_is_named_and_not_compared() -> None:
    found = comparison(run(OURS, [0.2]), run(Sampler.RLLIB, [GOAL]))

    assert found.steps_ratio(OURS) is None
    (caveat,) = caveats([found])
    assert "ppo-catch was not learnt by rlmesh-ray, torch with seed 1: mean return 0.2" in caveat


def test_the_table_shows_both_sides_and_the_verdict() -> None:
    curve = [0.1, GOAL]

    same = shown(table(comparison(run(OURS, curve), run(Sampler.RLLIB, curve))))
    other = shown(table(comparison(run(OURS, curve), run(Sampler.RLLIB, [GOAL]))))

    assert "rlmesh-ray, torch: 20 env steps to the threshold; RLlib's own curve" in same
    assert "RLlib: 20 env steps to the threshold" in same
    assert "rlmesh-ray, torch: 20 env steps to the threshold; 2.00 of RLlib's own" in other


def test_a_run_that_goes_on_counts_where_it_reached_the_threshold() -> None:
    found = run(OURS, [math.nan, GOAL, 0.1])

    assert found.is_learnt
    assert (found.decisive.env_steps, found.last.env_steps) == (20, 30)


def test_steps_to_the_threshold_have_an_interval_over_the_seeds_that_learnt() -> None:
    runs = [run(OURS, [GOAL], steps=steps, seed=seed) for seed, steps in enumerate((10, 20, 60))]
    rllibs = [run(Sampler.RLLIB, [GOAL], seed=seed) for seed in range(4)]
    found = comparison(*runs, run(OURS, [0.1], seed=3), *rllibs)

    mean, low, high = found.steps_to_threshold(OURS) or (0.0, 0.0, 0.0)

    assert mean == 30
    assert 10 <= low < 30 < high <= 60
    assert "3 of 4 seeds only" in shown(table(found))
    assert comparison(run(OURS, [0.1])).steps_to_threshold(OURS) is None


def test_a_mean_curve_has_the_steps_of_all_its_runs() -> None:
    runs = [run(OURS, [math.nan, 0.2, 0.4, 0.6]), run(OURS, [0.0, 0.8], steps=15, seed=2)]

    steps, means, low, high = mean_curve(runs)

    assert steps.tolist() == [20, 30]
    np.testing.assert_allclose(means, [(0.2 + 0.8 / 3) / 2, (0.4 + 0.8) / 2])
    np.testing.assert_allclose([low[1], high[1]], [0.4, 0.8])


def test_runs_without_an_episode_have_no_curve() -> None:
    assert [len(each) for each in mean_curve([run(OURS, [math.nan])])] == [0, 0, 0, 0]


def test_curves_are_drawn(tmp_path: Path) -> None:
    curve = [0.1, GOAL]
    path = tmp_path / "folder" / "curves.png"

    draw([comparison(run(OURS, curve), run(Sampler.RLLIB, curve))], path)

    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("jobs", [1, 3])
def test_each_side_learns_with_each_seed(jobs: int) -> None:
    def learn(_: LearningPlan, task: Task, sampler: Sampler, seed: int, note: Note) -> Run:
        made = run(sampler, [GOAL], seed=seed)
        note(task, sampler, seed, made.last)
        return made

    plan = LearningPlan([Task.PPO_CATCH], inferences=["compiled"], seeds=2, first_seed=5, jobs=jobs)
    noted = []

    (found,) = compare(plan, lambda task, sampler, seed, _: noted.append((sampler, seed)), learn)

    assert found.samplers == [Sampler.COMPILED, Sampler.RLLIB]
    assert [each.seed for each in found.of(Sampler.COMPILED)] == [5, 6]
    assert sorted(noted) == sorted((each.sampler, each.seed) for each in found.runs)
