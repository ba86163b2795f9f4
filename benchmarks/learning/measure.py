"""Whether algorithms learn through endpoints what they learn without them, in as many steps.

Each run is a fresh process with a Ray of its own; the sides take turns in going first. Both have
the same config and seed. PPO's runner samples in the driver's process, so the two curves must be
the same to the last digit. Elsewhere chance has a hand in it: RLlib does not seed the replay
buffers of DQN and SAC, and APPO and IMPALA learn what comes first.
"""

import enum
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.learning.plan import THRESHOLDS, LearningPlan, Task
from benchmarks.processes import Process

_LONGEST_ITERATION_S = 1_800.0
"""Far beyond any: a machine may be slow, but a run that hangs must end."""


class Sampler(enum.StrEnum):
    """Who steps the environments."""

    OURS = "rlmesh-ray"
    RLLIB = "RLlib"
    """Its own SingleAgentEnvRunner, with the environments in its process."""


@dataclass(frozen=True, slots=True)
class Point:
    """Where a run stood after an iteration; see ``rllib.training.TrainingProgress``."""

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
    def is_learnt(self) -> bool:
        """Whether it reached the threshold."""
        return self.last.return_mean >= THRESHOLDS[self.task].stop_return

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
        return {
            "task": self.task,
            "sampler": self.sampler,
            "seed": self.seed,
            "is_learnt": self.is_learnt,
            "threshold": THRESHOLDS[self.task].stop_return,
            "env_steps": self.last.env_steps,
            "iterations": self.last.iteration,
            "seconds": self.last.wall_s,
            "return_mean": self.last.return_mean,
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
    def steps_ratio(self) -> float | None:
        """Our steps by RLlib's, in the median of the seeds; None unless every run has learnt."""
        if not all(run.is_learnt for run in self.runs):
            return None
        pairs = zip(self.of(Sampler.OURS), self.of(Sampler.RLLIB), strict=True)
        return median(ours.last.env_steps / theirs.last.env_steps for ours, theirs in pairs)

    @property
    def is_same_curve(self) -> bool:
        """Whether all pairs of runs have the same curve."""
        pairs = zip(self.of(Sampler.OURS), self.of(Sampler.RLLIB), strict=True)
        return all(ours.has_curve_of(theirs) for ours, theirs in pairs)

    def as_json(self) -> dict[str, object]:
        """Return it for a program."""
        return {
            "task": self.task,
            "runs": [run.as_json() for run in self.runs],
            "steps_ratio": self.steps_ratio,
            "is_same_curve": self.is_same_curve,
        }


Note = Callable[[Task, Sampler, int, Point], None]


def compare(plan: LearningPlan, note: Note) -> Iterator[Comparison]:
    """Learn all of ``plan``; yield one task after the other.

    Args:
        plan: What to learn.
        note: Gets each point of each curve when it is reached.

    Raises:
        EndpointError: A run ended early, or an iteration took half an hour.
    """
    for task in plan.tasks:
        runs = []
        for repetition in range(plan.repetitions):
            seed = plan.first_seed + repetition
            runs += [_run(plan, task, each, seed, note) for each in _by_turns(repetition)]
        yield Comparison(task, tuple(runs))


def _by_turns(repetition: int) -> Sequence[Sampler]:
    return tuple(Sampler) if repetition % 2 == 0 else tuple(reversed(Sampler))


def _run(plan: LearningPlan, task: Task, sampler: Sampler, seed: int, note: Note) -> Run:
    threshold = THRESHOLDS[task]
    command = [
        *(sys.executable, "-m", "benchmarks.learning.run"),
        *("--task", task),
        *("--seed", str(seed)),
        *("--stop-return", str(threshold.stop_return)),
        *("--most-steps", str(plan.most_steps or threshold.most_steps)),
        *(["--through-endpoints"] if sampler is Sampler.OURS else []),
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
