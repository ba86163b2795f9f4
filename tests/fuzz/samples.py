"""What fuzz targets are made of, and what their seeds are made of."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.message import Message
from gymnasium import spaces

from rlmesh_ray.protocol import messages as m
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.spec import SpaceSpec
from tests.frame_mutation import damaged, mutate_frame


@dataclass(frozen=True, slots=True)
class Target:
    """One decoder."""

    run: Callable[[bytes], object]
    seeds: Callable[[], Iterable[bytes]]
    """Inputs to start from, from this package's own encoders."""
    kind: type[Message] | None
    """What an input holds, for mutations that keep it valid; None: no message of protobuf."""
    prefix_bytes: int = 0
    """What stands before it."""

    def mutate_frame(self, data: bytes, chance: random.Random) -> bytes:
        """Return another input that is a valid message."""
        own = data[self.prefix_bytes :]
        if self.kind is None:
            return data[: self.prefix_bytes] + damaged(own, chance)
        return data[: self.prefix_bytes] + mutate_frame(self.kind, own, chance)


@dataclass(frozen=True, slots=True)
class Samples:
    """What the seeds are made of."""

    gymnasium_spaces: Sequence[spaces.Space[Any]] = (
        spaces.Box(np.array([-1.0, -np.inf]), np.array([1.0, np.inf]), dtype=np.float64),
        spaces.Box(0, 255, (2, 2, 3), np.uint8),
        spaces.Box(-np.inf, np.inf, (1,), np.float16),
        spaces.Discrete(5, start=-2, dtype=np.int8),
        spaces.MultiBinary((2, 2)),
        spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
        spaces.Text(4, min_length=1, charset="abc"),
        spaces.Tuple([spaces.Discrete(3), spaces.Text(2), spaces.Box(0, 1, (2,))]),
        spaces.Dict(arm=spaces.Dict(grip=spaces.MultiBinary(2)), name=spaces.Text(3)),
        spaces.Dict(),
    )
    infos: dict[str, Any] = field(
        default_factory=lambda: {
            "scalars": [None, True, -1, 2**62, 0.5, float("nan"), "ä", b"\xff"],
            "arrays": {"b": np.array([True]), "f": np.zeros((2, 0), "<f2"), "c": np.complex64(1j)},
            "objects": np.array([None, {"deep": [1]}], object),
        }
    )


SAMPLES = Samples()
EPISODE = m.EpisodeRecord("e", 1, 2, 0.5, True, False, 5, 9, seed=-3, final_info={"a": 1})
NUM_LANES = 2


def specs() -> list[SpaceSpec]:
    """Return the specs of the sample spaces."""
    return [from_gymnasium(space) for space in SAMPLES.gymnasium_spaces]


def contracts() -> Iterator[EnvContract]:
    """Yield contracts with every sample space on either side."""
    own = specs()
    for observation, action in zip(own, reversed(own), strict=True):
        yield EnvContract(
            "Maze-v0",
            observation,
            action,
            NUM_LANES,
            AutoresetMode.NEXT_STEP,
            "rgb_array",
            {"render_fps": 30, "render_modes": ["rgb_array"]},
        )
