"""What can be learnt, and when it has been.

Standard library only: the command line needs it for its help.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


class Task(enum.StrEnum):
    """An algorithm and an environment."""

    PPO_CARTPOLE = "ppo-cartpole"
    PPO_CATCH = "ppo-catch"
    """From pixels: ``rlmesh_ray.testing.catch``."""
    APPO_CARTPOLE = "appo-cartpole"
    IMPALA_CARTPOLE = "impala-cartpole"
    DQN_CARTPOLE = "dqn-cartpole"
    SAC_PENDULUM = "sac-pendulum"
    SAC_PENDULUM_SMALL = "sac-pendulum-small"
    """Of small networks and batches, with one update for four env steps."""


class Sampler(enum.StrEnum):
    """What steps the environments, and how its runner runs the module."""

    AUTO = "rlmesh-ray, auto"
    TORCH = "rlmesh-ray, torch"
    COMPILED = "rlmesh-ray, compiled"
    RLLIB = "RLlib"
    """Its own SingleAgentEnvRunner, with the environments in its process."""

    @property
    def inference(self) -> str:
        """As of ``configure``; empty for RLlib's own runner."""
        return self.partition(", ")[2]


@dataclass(frozen=True, slots=True)
class Threshold:
    """When a task counts as learnt, and when it is given up."""

    stop_return: float
    """Mean return over the latest iterations that hold 32 episodes."""
    most_steps: int
    """Env steps after which a run is given up."""
    curve_steps: int
    """Env steps of a whole curve; see ``LearningPlan``."""


THRESHOLDS: Mapping[Task, Threshold] = MappingProxyType(
    {
        # Those of RLlib's own tuned examples, as far as there is one.
        Task.PPO_CARTPOLE: Threshold(350.0, 200_000, 100_000),
        Task.APPO_CARTPOLE: Threshold(450.0, 2_000_000, 500_000),
        Task.IMPALA_CARTPOLE: Threshold(450.0, 2_000_000, 500_000),
        Task.DQN_CARTPOLE: Threshold(450.0, 200_000, 100_000),
        # RLlib allows 20,000 steps, but looks at 5 episodes; 27 more are 5,400 steps.
        Task.SAC_PENDULUM: Threshold(-250.0, 30_000, 20_000),
        Task.SAC_PENDULUM_SMALL: Threshold(-400.0, 40_000, 17_000),
        # 39 balls of 40 are caught; RLlib has no such example.
        Task.PPO_CATCH: Threshold(0.95, 100_000, 50_000),
    }
)


@dataclass(frozen=True, slots=True)
class LearningPlan:
    """What is learnt, and how often."""

    tasks: Sequence[Task] = tuple(Task)
    inferences: Sequence[str] = ("torch", "compiled")
    """How our runner runs the module: some of ``rlmesh_ray.options.INFERENCES``."""
    seeds: int = 1
    """How many; each side learns with each of them."""
    first_seed: int = 1
    """The next ones count on."""
    most_steps: int | None = None
    """In place of those of the thresholds."""
    is_whole_curve: bool = False
    """Whether runs go on after the threshold, to ``Threshold.curve_steps``."""
    jobs: int = 1
    """Runs at a time."""

    @property
    def samplers(self) -> tuple[Sampler, ...]:
        """All sides, ours first."""
        ours = tuple(each for each in Sampler if each.inference in self.inferences)
        return (*ours, Sampler.RLLIB)
