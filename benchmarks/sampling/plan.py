"""Plan of a measurement of sampling: its tasks, its ways of inference and its peers.

Standard library only: the command line needs it for its help.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from benchmarks.stepping.specs import CARTPOLE, FRAMES


class Rival(enum.StrEnum):
    """What sampling through endpoints is compared with."""

    RLLIB = "rllib"
    """RLlib's own SingleAgentEnvRunner, with the environments in its process."""
    BARE = "bare"
    """The loop over gymnasium's SyncVectorEnv without a policy: the limit of one core."""
    TORCHRL = "torchrl"
    """TorchRL's Collector, with the environments in its process."""


class Task(enum.StrEnum):
    """An environment, and the number of lanes of the runner."""

    CARTPOLE_8 = "cartpole-8"
    CARTPOLE_64 = "cartpole-64"
    CARTPOLE_256 = "cartpole-256"
    PENDULUM_64 = "pendulum-64"
    FRAMES_8 = "frames-8"
    HALFCHEETAH_64 = "halfcheetah-64"
    """MuJoCo's, where the environment takes most of the time."""


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """What a task's runner samples."""

    env_id: str
    num_envs: int
    """Lanes of the runner: two sessions, with half of them each."""
    algorithm: str = "PPO"
    """Whose default module chooses the actions."""
    env_kwargs: Mapping[str, object] = field(default_factory=dict)

    @property
    def timesteps(self) -> int:
        """Env steps of each call of ``sample``: 4,000 of 64 lanes, PPO's default batch."""
        return 4_000 * self.num_envs // 64


TASKS: Mapping[Task, TaskSpec] = MappingProxyType(
    {
        Task.CARTPOLE_8: TaskSpec(CARTPOLE, 8),
        Task.CARTPOLE_64: TaskSpec(CARTPOLE, 64),
        Task.CARTPOLE_256: TaskSpec(CARTPOLE, 256),
        Task.PENDULUM_64: TaskSpec("Pendulum-v1", 64, "SAC"),
        Task.FRAMES_8: TaskSpec(
            FRAMES,
            8,
            # RLlib keeps the frames of an episode until it ends, so there is a time limit.
            env_kwargs={"step_s": 0.0, "is_float": True, "max_episode_steps": 100},
        ),
        Task.HALFCHEETAH_64: TaskSpec("HalfCheetah-v5", 64),
    }
)


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """The cases, the peers, the repetitions and the durations."""

    rivals: Sequence[Rival] = (Rival.RLLIB, Rival.BARE)
    tasks: Sequence[Task] = (Task.CARTPOLE_64,)
    inferences: Sequence[str] = ("auto", "torch")
    """How our runner runs the module: some of ``rlmesh_ray.options.INFERENCES``."""
    sessions_per_worker: Sequence[int] = (1, 2)
    """How many of the runner's two sessions share an env worker's process; each is a side."""
    repetitions: int = 5
    warm_up_s: float = 1.0
    """Before each measurement; not counted."""
    seconds: float = 5.0
    """Of each measurement, at least."""

    def rivals_of(self, task: Task) -> Sequence[Rival]:
        """Return the peers that can do a task: that of TorchRL has no network for frames."""
        cannot = {Rival.TORCHRL} if task is Task.FRAMES_8 else set()
        return [rival for rival in self.rivals if rival not in cannot]
