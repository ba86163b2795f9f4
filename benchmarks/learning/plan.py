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


@dataclass(frozen=True, slots=True)
class Threshold:
    """When a task counts as learnt, and when it is given up."""

    stop_return: float
    """Mean return over the latest iterations that hold 32 episodes."""
    most_steps: int
    """Env steps."""


THRESHOLDS: Mapping[Task, Threshold] = MappingProxyType(
    {
        # Those of RLlib's own tuned examples, as far as there is one.
        Task.PPO_CARTPOLE: Threshold(350.0, 200_000),
        Task.APPO_CARTPOLE: Threshold(450.0, 2_000_000),
        Task.IMPALA_CARTPOLE: Threshold(450.0, 2_000_000),
        Task.DQN_CARTPOLE: Threshold(450.0, 200_000),
        # RLlib allows 20,000 steps, but looks at 5 episodes; 27 more are 5,400 steps.
        Task.SAC_PENDULUM: Threshold(-250.0, 30_000),
        # 39 balls of 40 are caught; RLlib has no such example.
        Task.PPO_CATCH: Threshold(0.95, 100_000),
    }
)


@dataclass(frozen=True, slots=True)
class LearningPlan:
    """What is learnt, and how often."""

    tasks: Sequence[Task] = tuple(Task)
    repetitions: int = 1
    first_seed: int = 1
    """Of the first repetition; the next ones count on."""
    most_steps: int | None = None
    """In place of the thresholds."""
