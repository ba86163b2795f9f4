"""Recordings that tests make in this process, without a writer of their own."""

from pathlib import Path
from typing import Any

import numpy as np

from rlmesh_ray.recording.recorder import Segment, Stream
from rlmesh_ray.recording.store import RecordingInfo
from rlmesh_ray.recording.writer_process import EpisodeWriter
from rlmesh_ray.spaces.spec import BoxSpec, DiscreteSpec

_INFINITY = np.float32(np.inf)
ENDLESS = BoxSpec((), "float32", (-_INFINITY).tobytes(), _INFINITY.tobytes())
POLE = BoxSpec((4,), "float32", (-_INFINITY).tobytes(), _INFINITY.tobytes())
INFO = RecordingInfo("CartPole-v1", POLE, DiscreteSpec(2), 50.0)


def cart_pole(length: int, seed: int) -> Segment:
    """Return an episode of random numbers."""
    random = np.random.default_rng(seed)
    flags = np.zeros((2, length + 1), np.bool_)
    flags[0, -1] = True
    return Segment(
        episode=seed % 2,
        columns=[
            random.random((length + 1, 4), np.float32),
            random.integers(2, size=length + 1),
            np.concatenate([[0.0], np.ones(length)]),
            *flags,
        ],
        infos=[{}] * (length + 1),
        begins=True,
        ends=True,
        seed=seed,
        policy_version=3,
    )


def written(folder: Path, info: RecordingInfo, *parts: Segment, **options: Any) -> EpisodeWriter:
    """Write segments; return the writer, closed."""
    video, max_gb = options.get("video", "auto"), options.get("max_gb", 1.0)
    writer = EpisodeWriter(folder, max_gb)
    writer.handle("0", Stream(info, "127.0.0.1:50051", video))
    for part in parts:
        writer.handle("0", part)
    writer.close()
    return writer


def cart_poles(folder: Path, num_episodes: int) -> list[Segment]:
    """Record episodes of 3, 4, 5 … steps."""
    parts = [cart_pole(3 + number, seed=number) for number in range(num_episodes)]
    written(folder, INFO, *parts)
    return parts
