"""An environment that gives back what it is given, in any space; for both sides."""

import string
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

_BOX_DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64",
)  # fmt: skip


def _box(dtype: str) -> spaces.Box:
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return spaces.Box(-np.inf, np.inf, (2, 3), kind.type)
    bounds = (0, 1) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)
    return spaces.Box(*bounds, (2, 3), kind.type)


SPACES: dict[str, spaces.Space[Any]] = {
    "boxes": spaces.Dict({dtype: _box(dtype) for dtype in _BOX_DTYPES}),
    "box": spaces.Box(
        np.array([-1.5, -np.inf, 0.25], np.float32), np.array([1.5, 0.5, np.inf], np.float32)
    ),
    "picture": spaces.Box(0, 255, (4, 5, 3), np.uint8),
    "discrete": spaces.Discrete(7),
    "shifted": spaces.Discrete(5, start=-2),
    "flags": spaces.MultiBinary(4),
    "table": spaces.MultiBinary((2, 3)),
    "wheels": spaces.MultiDiscrete([3, 5, 2]),
    # A charset of one's own: samples of the default one depend on the process.
    "text": spaces.Text(6, charset=string.ascii_letters + " äß漢"),
    "tuple": spaces.Tuple(
        [spaces.Discrete(3), spaces.Box(-1, 1, (2,)), spaces.Text(3, charset="xyz")]
    ),
    "nested": spaces.Dict(
        {
            "b": spaces.Dict({"z": spaces.Discrete(3), "a": spaces.Box(0, 1, (1,))}),
            "a": spaces.Tuple([spaces.Tuple([spaces.MultiBinary(2)]), spaces.Discrete(4)]),
        }
    ),
}
"""Of every kind that both have."""

LARGE = spaces.Box(0, 255, (1500, 1500, 3), np.uint8)
"""Beyond the 4 MiB that gRPC takes by default; ``echo:large``."""

# What is easily lost on the way: the sign of zero, numbers too small to be normal, the largest.
_EDGES = {
    "int64": [-(2**63), 2**63 - 1, 2**53 + 1],
    "uint64": [1, 2**63, 2**64 - 1],
    "float16": [-0.0, 2.0**-24, -65504.0],
    "float32": [-0.0, 2.0**-149, -3.4028234e38],
    "float64": [-0.0, 5e-324, -1.7976931348623157e308],
}


class Echo(gymnasium.Env[Any, Any]):
    """Observes its last action, and ``first`` before there is one."""

    def __init__(self, name: str) -> None:
        self.observation_space = self.action_space = {"large": LARGE, **SPACES}[name]
        self.metadata = {"render_modes": []}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Observe a sample that depends on ``seed`` only."""
        super().reset(seed=seed)
        space = deepcopy(self.observation_space)
        space.seed(seed)
        return space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Observe ``action``."""
        return action, 0.0, False, False, {}


def samples(name: str, count: int) -> list[Any]:
    """Return ``count`` values of a space, the same ones everywhere; edges are among them."""
    space = deepcopy(SPACES[name])
    space.seed(11)
    values = [space.sample() for _ in range(count)]
    if name == "boxes":
        for dtype, edges in _EDGES.items():
            values[0][dtype][0] = edges
    return values


def batched(name: str, lanes: list[Any]) -> Any:
    """Return values of a space, one a lane, as one batch in gymnasium's form."""
    space = SPACES[name]
    return deepcopy(concatenate(space, lanes, create_empty_array(space, len(lanes))))


def batches(name: str, num_lanes: int, count: int) -> list[Any]:
    """Return ``samples`` as ``count`` batches of ``num_lanes``."""
    values = samples(name, num_lanes * count)
    starts = range(0, len(values), num_lanes)
    return [batched(name, values[start : start + num_lanes]) for start in starts]


def with_unsigned_flags(space: spaces.Space[Any], value: Any) -> Any:
    """Return a value or batch of ``space`` with flags as uint8, as the peer has them."""
    if isinstance(space, spaces.Dict):
        return {key: with_unsigned_flags(part, value[key]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        parts = zip(space.spaces, value, strict=True)
        return tuple(with_unsigned_flags(part, own) for part, own in parts)
    return value.astype(np.uint8) if isinstance(space, spaces.MultiBinary) else value
