"""Recorded episodes: a Parquet file and a video each, written beside what steps, and read back.

``evaluate``, ``EnvServer`` and ``rlmesh-ray train`` record; ``load`` reads.
"""

import importlib
from typing import TYPE_CHECKING

from rlmesh_ray.recording.options import RecordOptions
from rlmesh_ray.recording.store import (
    EpisodeSummary,
    RecordedEpisode,
    Recording,
    load,
    to_minari,
)

if TYPE_CHECKING:
    from rlmesh_ray.recording.rllib_episodes import offline_data, record_episodes

__all__ = [
    "EpisodeSummary",
    "RecordOptions",
    "RecordedEpisode",
    "Recording",
    "load",
    "offline_data",
    "record_episodes",
    "to_minari",
]


def __getattr__(name: str) -> object:
    if name in {"offline_data", "record_episodes"}:  # they need Ray
        return getattr(importlib.import_module("rlmesh_ray.recording.rllib_episodes"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
