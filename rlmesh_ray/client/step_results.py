"""The results of vector steps and resets."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.protocol.messages import EpisodeRecord, Infos
from rlmesh_ray.spaces.leaves import Column


@dataclass(frozen=True, slots=True)
class ResetResult:
    """First observations, over all lanes."""

    observation: list[Column]
    infos: Infos
    episode_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one vector step; every array has one entry per lane."""

    observation: list[Column]
    rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    infos: Infos
    completed_episodes: tuple[EpisodeRecord, ...]
    episode_ids: tuple[str, ...]
