"""Specs made of what a peer told, checked: each makes a valid gymnasium space.

Both generations describe the same spaces in messages of their own; what they may describe is the
same, and stands here.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import CodecError
from rlmesh_ray.spaces.spec import (
    MAX_LANE_BYTES,
    MAX_RANK,
    BoxSpec,
    DiscreteSpec,
    MultiBinarySpec,
    MultiDiscreteSpec,
    TextSpec,
)

PartT = TypeVar("PartT")

_INT64_MAX = 2**63 - 1


class LaneBudget:
    """What the arrays of one lane may still take, over all leaves of a space."""

    def __init__(self) -> None:
        self._bytes_left = MAX_LANE_BYTES

    def take(self, shape: Sequence[int], item_bytes: int) -> None:
        """Count an array.

        Raises:
            CodecError: NumPy has no such shape, or the lane becomes too large.
        """
        if len(shape) > MAX_RANK or min(shape, default=0) < 0:
            raise CodecError(f"shape {tuple(shape[: MAX_RANK + 1])} is not possible")
        # Empty axes count as one, since NumPy multiplies the others whatever they hold.
        self._bytes_left -= item_bytes * math.prod(max(length, 1) for length in shape)
        if self._bytes_left < 0:
            raise CodecError(f"shape {shape}: values of more than {MAX_LANE_BYTES} bytes a lane")


def box(
    shape: tuple[int, ...], dtype: np.dtype[Any], low: NDArray[Any], high: NDArray[Any]
) -> BoxSpec:
    """Return a Box, whose shape the caller has counted.

    Args:
        shape: Of a value.
        dtype: Of a value.
        low: Flat, little endian: one bound an element, or one that is all.
        high: Likewise.

    Raises:
        CodecError: The bounds make no sense.
    """
    if np.isnan(low).any() or np.isnan(high).any() or (low > high).any():
        raise CodecError("a bound is NaN, or a lower bound is above its upper bound")
    return BoxSpec(shape, dtype.name, low.tobytes(), high.tobytes())


def multi_binary(n: int | tuple[int, ...], budget: LaneBudget) -> MultiBinarySpec:
    """Return a MultiBinary of a size or a shape. Raises CodecError if there is none."""
    spec = MultiBinarySpec(n)
    if min(spec.shape, default=1) < 1:
        raise CodecError(f"MultiBinary has axes {spec.shape}; they must be positive")
    budget.take(spec.shape, 1)
    return spec


def multi_discrete(
    nvec: tuple[int, ...], shape: tuple[int, ...], dtype: str, budget: LaneBudget
) -> MultiDiscreteSpec:
    """Return a MultiDiscrete; ``nvec`` is in C order. Raises CodecError if there is none."""
    budget.take(shape, np.dtype(dtype).itemsize)
    if len(nvec) != math.prod(shape):
        raise CodecError(f"MultiDiscrete has {len(nvec)} counts for shape {shape}")
    if min(nvec, default=1) < 1 or max(nvec, default=1) > np.iinfo(dtype).max:
        raise CodecError(f"MultiDiscrete has a count that is not in 1 to the largest {dtype}")
    return MultiDiscreteSpec(nvec, shape, dtype)


def discrete(n: int, start: int, dtype: str) -> DiscreteSpec:
    """Return a Discrete. Raises CodecError if its dtype cannot hold it."""
    info = np.iinfo(dtype)
    if not 1 <= n <= info.max or not info.min <= start <= info.max:
        raise CodecError(f"Discrete has n={n} and start={start}, which {dtype} cannot hold")
    if start + n - 1 > min(_INT64_MAX, info.max):
        raise CodecError(f"Discrete with n={n} and start={start} goes beyond {dtype} or int64")
    return DiscreteSpec(n, start, dtype)


def text(min_length: int, max_length: int, charset: str) -> TextSpec:
    """Return a Text. Raises CodecError if its lengths make no sense."""
    if not 0 <= min_length <= max_length:
        raise CodecError(f"Text has lengths {min_length} to {max_length}")
    return TextSpec(min_length, max_length, "".join(sorted(set(charset))))


def named_parts(keys: Sequence[str], parts: Sequence[PartT]) -> list[tuple[str, PartT]]:
    """Return a Dict's parts with their keys. Raises CodecError if they do not belong together."""
    if len(keys) != len(parts) or len(set(keys)) != len(keys):
        raise CodecError(f"Dict: {len(keys)} keys, {len(parts)} spaces, or a key occurs twice")
    return list(zip(keys, parts, strict=True))


def require_integer(dtype: str) -> str:
    """Return ``dtype`` if it is one of integers. Raises CodecError if not."""
    if np.dtype(dtype).kind not in "iu":
        raise CodecError(f"{dtype} is no integer type")
    return dtype


def extremes(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return the bounds of an unbounded Box."""
    if dtype.kind == "f":
        return -np.inf, np.inf
    if dtype.kind == "b":
        return False, True
    return np.iinfo(dtype).min, np.iinfo(dtype).max


def unbounded(size: int, dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return ``(low, high)`` of an unbounded Box of ``size`` elements, as ``box`` takes them."""
    low, high = extremes(dtype)
    little = dtype.newbyteorder("<")
    return np.array([low], little)[:size], np.array([high], little)[:size]


def typed_bounds(raw: bytes, name: str, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return bounds that came as bytes.

    Args:
        raw: Little endian.
        name: Of their form, for messages.
        count: How many there must be.
        dtype: Of the space.

    Raises:
        CodecError: There are more or fewer, or a bool is neither 0 nor 1.
    """
    expected = dtype.itemsize * count
    if len(raw) != expected:
        raise CodecError(f"{name} has {len(raw)} bytes, expected {expected}")
    if dtype.kind == "b" and raw.strip(b"\x00\x01"):
        raise CodecError("a bool bound is neither 0 nor 1")
    return np.frombuffer(raw, dtype.newbyteorder("<"))
