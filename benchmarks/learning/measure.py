"""Whether algorithms learn through endpoints what they learn without them, in as many steps.

Each run is a fresh process with a Ray of its own; the sides take turns in going first. All have the
same config and seed. PPO's runner samples in the driver's process, so the curve with
``inference="torch"`` must be RLlib's own to the last digit. Compiled, other actions are drawn.
Elsewhere chance has a hand in it: RLlib does not seed the replay buffers of DQN and SAC, and APPO
and IMPALA learn what comes first.
"""

import math
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import mean, median

from benchmarks.learning.plan import THRESHOLDS, LearningPlan, Sampler, Task
from benchmarks.processes import Process
from benchmarks.record import by_turns
from benchmarks.statistics import interval_of_mean

_LONGEST_ITERATION_S = 1_800.0
"""Far beyond any: a machine may be slow, but a run that hangs must end."""


@dataclass(frozen=True, slots=True)
class Point:
    """Where a run stood after an iteration; see ``rllib.checkpoint_folder.TrainingProgress``."""

    iteration: int
    env_steps: int
    return_mean: float
    """nan as long as no episode has ended."""
    wall_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """One learning curve."""

    task: Task
    sampler: Sampler
    seed: int
    points: tuple[Point, ...]
    """At least one."""

    @property
    def last(self) -> Point:
        """Where it ended."""
        return self.points[-1]

    @property
    def reached(self) -> Point | None:
        """The first point at or above the threshold; None: there is none."""
        least = THRESHOLDS[self.task].stop_return
        return next((point for point in self.points if point.return_mean >= least), None)

    @property
    def is_learnt(self) -> bool:
        """Whether it reached the threshold."""
        return self.reached is not None

    @property
    def decisive(self) -> Point:
        """Where it reached the threshold; else where it ended."""
        return self.reached or self.last

    def has_curve_of(self, other: "Run") -> bool:
        """Return whether two runs saw the same returns after the same steps, to the last digit."""
        return len(self.points) == len(other.points) and all(
            mine.env_steps == theirs.env_steps
            and (
                mine.return_mean == theirs.return_mean
                or (math.isnan(mine.return_mean) and math.isnan(theirs.return_mean))
            )
            for mine, theirs in zip(self.points, other.points, strict=True)
        )

    def as_json(self) -> dict[str, object]:
        """Return it for a program, without the points, which it has had already."""
        point = self.decisive
        return {
            "task": self.task,
            "sampler": self.sampler,
            "seed": self.seed,
            "is_learnt": self.is_learnt,
            "threshold": THRESHOLDS[self.task].stop_return,
            "env_steps": point.env_steps,
            "iterations": point.iteration,
            "seconds": point.wall_s,
            "return_mean": point.return_mean,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """All runs of one task."""

    task: Task
    runs: tuple[Run, ...]

    def of(self, sampler: Sampler) -> list[Run]:
        """Return one side's runs, by seed."""
        return sorted((run for run in self.runs if run.sampler is sampler), key=lambda r: r.seed)

    @property
    def samplers(self) -> list[Sampler]:
        """The sides that have learnt, ours first."""
        return [each for each in Sampler if self.of(each)]

    def steps_ratio(self, sampler: Sampler) -> float | None:
        """Return a side's steps by RLlib's, in the median of the seeds.

        None unless every run of the two has learnt.
        """
        pairs = self._pairs(sampler)
        if not all(run.is_learnt for pair in pairs for run in pair):
            return None
        return median(ours.decisive.env_steps / theirs.decisive.env_steps for ours, theirs in pairs)

    def is_same_curve(self, sampler: Sampler) -> bool:
        """Return whether all runs of a side have the curves of RLlib's."""
        return all(ours.has_curve_of(theirs) for ours, theirs in self._pairs(sampler))

    def steps_to_threshold(self, sampler: Sampler) -> tuple[float, float, float] | None:
        """Return mean and 95 % interval over the seeds with which a side has learnt; None: none."""
        steps = [run.decisive.env_steps for run in self.of(sampler) if run.is_learnt]
        if not steps:
            return None
        low, high = interval_of_mean(steps)
        return mean(steps), float(low), float(high)

    def _pairs(self, sampler: Sampler) -> list[tuple[Run, Run]]:
        return list(zip(self.of(sampler), self.of(Sampler.RLLIB), strict=True))

    def as_json(self) -> dict[str, object]:
        """Return it for a program."""
        ours = [each for each in self.samplers if each is not Sampler.RLLIB]
        return {
            "task": self.task,
            "runs": [run.as_json() for run in self.runs],
            "steps_to_threshold": {each: self.steps_to_threshold(each) for each in self.samplers},
            "steps_ratio": {each: self.steps_ratio(each) for each in ours},
            "is_same_curve": {each: self.is_same_curve(each) for each in ours},
        }


Note = Callable[[Task, Sampler, int, Point], None]
Learn = Callable[[LearningPlan, Task, Sampler, int, Note], Run]


def compare(plan: LearningPlan, note: Note, learn: Learn | None = None) -> Iterator[Comparison]:
    """Learn all of ``plan``; yield one task after the other.

    Args:
        plan: What to learn.
        note: Gets each point of each curve when it is reached.
        learn: Does a run; default: in a fresh process.

    Raises:
        EndpointError: A run ended early, or an iteration took half an hour.
    """
    lock = threading.Lock()

    def note_alone(task: Task, sampler: Sampler, seed: int, point: Point) -> None:
        with lock:
            note(task, sampler, seed, point)

    for task in plan.tasks:
        executor = ThreadPoolExecutor(plan.jobs)
        try:
            futures = [
                executor.submit(learn or _run, plan, task, sampler, seed, note_alone)
                for sampler, seed in _runs(plan)
            ]
            yield Comparison(task, tuple(future.result() for future in futures))
        finally:
            executor.shutdown(cancel_futures=True)


def _runs(plan: LearningPlan) -> list[tuple[Sampler, int]]:
    """Return side and seed of each run of a task."""
    return [
        (sampler, plan.first_seed + number)
        for number in range(plan.seeds)
        for sampler in by_turns(plan.samplers, number)
    ]


def _run(plan: LearningPlan, task: Task, sampler: Sampler, seed: int, note: Note) -> Run:
    threshold = THRESHOLDS[task]
    most_steps = threshold.curve_steps if plan.is_whole_curve else threshold.most_steps
    command = [
        *(sys.executable, "-m", "benchmarks.learning.run"),
        *("--task", task),
        *("--seed", str(seed)),
        *(() if plan.is_whole_curve else ("--stop-return", str(threshold.stop_return))),
        *("--most-steps", str(plan.most_steps or most_steps)),
        *("--inference", sampler.inference),
    ]
    points: list[Point] = []
    with Process(f"{task} ({sampler}, seed {seed})", command) as process:
        while (message := process.receive(_LONGEST_ITERATION_S)) != {"done": True}:
            mean = message["return_mean"]
            point = Point(
                iteration=message["iteration"],
                env_steps=message["env_steps"],
                return_mean=math.nan if mean is None else mean,
                wall_s=message["wall_s"],
            )
            points.append(point)
            note(task, sampler, seed, point)
    return Run(task, sampler, seed, tuple(points))
