"""Validation of specs and columns that a peer sent, shared by both generations.

Each generation describes spaces in its own messages; the allowed spaces are the same. Each spec
that is returned here makes a valid gymnasium space.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import CodecError
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.spec import (
    MAX_DEPTH,
    MAX_LANE_BYTES,
    MAX_PATH_CHARACTERS,
    MAX_RANK,
    PART_CHARACTERS,
    BoxSpec,
    Column,
    DiscreteSpec,
    Leaf,
    MultiBinarySpec,
    MultiDiscreteSpec,
    SpaceSpec,
    TextSpec,
    leaves,
)
from rlmesh_ray.spaces.validation import extremes
from rlmesh_ray.wire.rlmesh_v1.limits import MAX_MESSAGE_BYTES


def check_column(leaf: Leaf, column: Column, num_lanes: int) -> None:
    """Require that ``column`` has the leaf's dtype and shape. Raises CodecError if not."""
    if not _fits(leaf, column, num_lanes):
        found = (
            f"{len(column)} texts"
            if isinstance(column, tuple)
            else f"{column.dtype} {column.shape}"
        )
        expected = "texts" if leaf.dtype is None else f"{leaf.dtype} {leaf.shape}"
        raise CodecError(
            f"column {leaf.name!r} is {found}, expected {num_lanes} lanes of {expected}"
        )


def check_size(leaf: Leaf, size_bytes: int, num_lanes: int) -> None:
    """Require the byte size of an array leaf's column. Raises CodecError if it differs."""
    expected = num_lanes * leaf.lane_bytes
    if size_bytes != expected:
        place = f" at {leaf.name}" if leaf.path else ""
        raise CodecError(
            f"{size_bytes} bytes{place}, expected {expected} "
            f"({num_lanes} lanes of {leaf.dtype} {leaf.shape})"
        )


def _fits(leaf: Leaf, column: Column, num_lanes: int) -> bool:
    # The kind is compared first: NumPy takes None for float64 when it compares dtypes.
    if leaf.dtype is None or isinstance(column, tuple):
        return leaf.dtype is None and isinstance(column, tuple) and len(column) == num_lanes
    return column.dtype == leaf.dtype and column.shape == (num_lanes, *leaf.shape)


MessageT = TypeVar("MessageT")

_REWARD_BYTES = 8


def named_space(name: str, read: Callable[[MessageT], SpaceSpec], message: MessageT) -> SpaceSpec:
    """Return ``read(message)``; its CodecError is raised again with ``name`` in front."""
    try:
        return read(message)
    except CodecError as error:
        raise CodecError(f"{name}: {error}") from error


def require_width(contract: EnvContract) -> EnvContract:
    """Return ``contract`` if its lanes fit into one message; call it before allocating arrays.

    Raises:
        CodecError: They do not fit.
    """
    for spec in (contract.observation_space, contract.action_space):
        lane_bytes = sum(leaf.lane_bytes for leaf in leaves(spec)) + _REWARD_BYTES
        if contract.num_envs * lane_bytes > MAX_MESSAGE_BYTES:
            raise CodecError(
                f"{contract.num_envs} lanes of {lane_bytes} bytes do not fit into a message of at "
                f"most {MAX_MESSAGE_BYTES} bytes; serve fewer lanes"
            )
    return contract


PartT = TypeVar("PartT")

_INT64_MAX = 2**63 - 1
MAX_LANES = 2**16
"""Most lanes of a session, over all routes with a policy, which may remember something about each
of them: a client can claim any number in one request."""


def few(values: Sequence[PartT], what: str, most: int = MAX_LANES) -> tuple[PartT, ...]:
    """Return the values of a repeated field of a message from a peer.

    Raises:
        CodecError: There are more than ``most``, which would keep every other session waiting.
    """
    if len(values) > most:
        raise CodecError(f"{len(values)} {what}, and {most} are the limit")
    return tuple(values)


class LaneBudget:
    """Remaining budget of a peer's space: bytes of one lane's arrays, and characters of paths."""

    def __init__(self) -> None:
        self._bytes_left = MAX_LANE_BYTES
        self._characters_left = MAX_PATH_CHARACTERS

    def enter(self, path: Sequence[str]) -> None:
        """Subtract a subspace and the name of its place, which may be long above many short ones.

        Raises:
            CodecError: It is nested too deep, or the space has too many parts, or too long keys.
        """
        if len(path) > MAX_DEPTH:
            raise CodecError(f"the space is nested more than {MAX_DEPTH} deep")
        self._characters_left -= PART_CHARACTERS + sum(map(len, path))
        if self._characters_left < 0:
            raise CodecError(
                f"the space has more than {MAX_PATH_CHARACTERS // PART_CHARACTERS} parts, or "
                "long keys above many parts"
            )

    def take(self, shape: Sequence[int], item_bytes: int) -> None:
        """Subtract an array's size.

        Raises:
            CodecError: NumPy has no such shape, or the budget is exhausted.
        """
        if len(shape) > MAX_RANK or min(shape, default=0) < 0:
            raise CodecError(f"shape {tuple(shape[: MAX_RANK + 1])} is not possible")
        # Empty axes count as one: NumPy multiplies the other axes even of an empty array.
        self._bytes_left -= item_bytes * math.prod(max(length, 1) for length in shape)
        if self._bytes_left < 0:
            raise CodecError(f"shape {shape}: values of more than {MAX_LANE_BYTES} bytes a lane")


def box(
    shape: tuple[int, ...], dtype: np.dtype[Any], low: NDArray[Any], high: NDArray[Any]
) -> BoxSpec:
    """Return a Box; the caller has checked its shape with a LaneBudget.

    Args:
        shape: Shape of a value.
        dtype: Dtype of a value.
        low: Flat, little-endian lower bounds: one for each element, or one for all.
        high: Upper bounds, in the same form.

    Raises:
        CodecError: A bound is NaN, or a lower bound is above its upper bound.
    """
    if np.isnan(low).any() or np.isnan(high).any() or (low > high).any():
        raise CodecError("a bound is NaN, or a lower bound is above its upper bound")
    return BoxSpec(shape, dtype.name, low.tobytes(), high.tobytes())


def multi_binary(n: int | tuple[int, ...], budget: LaneBudget) -> MultiBinarySpec:
    """Return a MultiBinary of a size or a shape. Raises CodecError where that is invalid."""
    spec = MultiBinarySpec(n)
    if min(spec.shape, default=1) < 1:
        raise CodecError(f"MultiBinary has axes {spec.shape}; they must be positive")
    budget.take(spec.shape, 1)
    return spec


def multi_discrete(
    nvec: tuple[int, ...], shape: tuple[int, ...], dtype: str, budget: LaneBudget
) -> MultiDiscreteSpec:
    """Return a MultiDiscrete; ``nvec`` is in C order. Raises CodecError where it is invalid."""
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
    """Return a Text. Raises CodecError if its lengths are invalid."""
    if not 0 <= min_length <= max_length:
        raise CodecError(f"Text has lengths {min_length} to {max_length}")
    return TextSpec(min_length, max_length, "".join(sorted(set(charset))))


def named_parts(keys: Sequence[str], parts: Sequence[PartT]) -> list[tuple[str, PartT]]:
    """Return a Dict's parts with their keys. Raises CodecError for other or duplicate keys."""
    if len(keys) != len(parts) or len(set(keys)) != len(keys):
        raise CodecError(f"Dict: {len(keys)} keys, {len(parts)} spaces, or a key occurs twice")
    return list(zip(keys, parts, strict=True))


def require_integer(dtype: str) -> str:
    """Return ``dtype`` if it is an integer dtype. Raises CodecError if not."""
    if np.dtype(dtype).kind not in "iu":
        raise CodecError(f"{dtype} is no integer type")
    return dtype


def unbounded(size: int, dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return ``(low, high)`` of an unbounded Box of ``size`` elements, as ``box`` takes them."""
    low, high = extremes(dtype)
    little = dtype.newbyteorder("<")
    return np.array([low], little)[:size], np.array([high], little)[:size]


def typed_bounds(raw: bytes, name: str, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return bounds that a peer sent as bytes.

    Args:
        raw: Little-endian bytes of the bounds.
        name: Name of the field, for messages.
        count: Expected number of bounds.
        dtype: Dtype of the space.

    Raises:
        CodecError: The number differs, or a bool is neither 0 nor 1.
    """
    expected = dtype.itemsize * count
    if len(raw) != expected:
        raise CodecError(f"{name} has {len(raw)} bytes, expected {expected}")
    if dtype.kind == "b" and raw.strip(b"\x00\x01"):
        raise CodecError("a bool bound is neither 0 nor 1")
    return np.frombuffer(raw, dtype.newbyteorder("<"))
