"""Specs: descriptions of spaces without gymnasium, as values that compare, hash and pickle.

A spec describes one lane. ``wire`` encodes specs, ``spaces.gym_conversion`` converts them from and
to gymnasium spaces; everything between works on specs alone, and mostly on their leaves: the
subspaces other than Dict and Tuple, in depth-first order.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

DTYPES = (
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
)
"""NumPy names of every dtype that a leaf can have."""
MAX_DEPTH = 32
"""Deepest nesting of Dict and Tuple; limits every recursion over a spec."""
MAX_RANK = 31
"""Most axes of a leaf; a batch adds one, and NumPy 1 allows 32."""
MAX_LANE_BYTES = 2**27
"""Largest total size of one lane's arrays, so that a spec from a peer cannot exhaust memory."""
MAX_COUNTS = 2**19
"""Most counts of a MultiDiscrete."""
MAX_PATH_CHARACTERS, PART_CHARACTERS = 2**20, 256
"""Most characters of the paths of all parts of a space together, and what each part adds."""


@dataclass(frozen=True, slots=True)
class BoxSpec:
    """An array with bounds."""

    shape: tuple[int, ...]
    dtype: str
    """NumPy name, such as ``"float32"``."""
    low: bytes
    """Lower bounds: C order, little endian, at ``dtype``; a single one where all are equal, so
    that a small message from a peer cannot become a spec of many megabytes."""
    high: bytes
    """Upper bounds, in the same form."""

    def __post_init__(self) -> None:
        item_bytes = np.dtype(self.dtype).itemsize
        object.__setattr__(self, "low", _shortened(self.low, item_bytes))
        object.__setattr__(self, "high", _shortened(self.high, item_bytes))

    def __repr__(self) -> str:
        low, high = (_bounds_text(each, self.dtype) for each in (self.low, self.high))
        return f"BoxSpec(shape={self.shape}, dtype={self.dtype!r}, low={low}, high={high})"

    def bounds(self) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
        """Return ``(low, high)`` as read-only arrays of ``shape`` and ``dtype``."""
        return self._array(self.low), self._array(self.high)

    def _array(self, bounds: bytes) -> NDArray[np.generic]:
        dtype = np.dtype(self.dtype).newbyteorder("<")
        array = np.frombuffer(bounds, dtype)
        if len(array) == 1:
            return np.broadcast_to(array[0], self.shape)
        return array.reshape(self.shape)


def _bounds_text(bounds: bytes, dtype: str) -> str:
    values = np.frombuffer(bounds, np.dtype(dtype).newbyteorder("<"))
    if len(values) == 1:
        return str(values[0].item())
    return np.array2string(values, separator=", ", threshold=8, edgeitems=2)


def _shortened(bounds: bytes, item_bytes: int) -> bytes:
    # Bytes are compared, not numbers: 0.0 and -0.0 are different bounds.
    first = bounds[:item_bytes]
    return first if bounds == first * (len(bounds) // item_bytes) else bounds


@dataclass(frozen=True, slots=True)
class DiscreteSpec:
    """An integer in ``[start, start + n)``."""

    n: int
    start: int = 0
    dtype: str = "int64"


@dataclass(frozen=True, slots=True)
class MultiBinarySpec:
    """Zeros and ones, one int8 each."""

    n: int | tuple[int, ...]
    """Number of elements, or a shape, as in gymnasium."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a value."""
        return self.n if isinstance(self.n, tuple) else (self.n,)


@dataclass(frozen=True, slots=True)
class MultiDiscreteSpec:
    """Integers, element ``i`` in ``[0, nvec[i])``."""

    nvec: tuple[int, ...]
    """Number of values of each element, in C order."""
    shape: tuple[int, ...]
    dtype: str = "int64"


@dataclass(frozen=True, slots=True)
class TextSpec:
    """A string."""

    min_length: int
    max_length: int
    charset: str
    """Allowed characters, sorted; empty allows every character."""


@dataclass(frozen=True, slots=True)
class DictSpec:
    """Named subspaces, in the order of the space."""

    items: "tuple[tuple[str, SpaceSpec], ...]"


@dataclass(frozen=True, slots=True)
class TupleSpec:
    """Subspaces by position."""

    items: "tuple[SpaceSpec, ...]"


ArraySpec = BoxSpec | DiscreteSpec | MultiBinarySpec | MultiDiscreteSpec
LeafSpec = ArraySpec | TextSpec
SpaceSpec = LeafSpec | DictSpec | TupleSpec


def extremes(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    if dtype.kind == "f":
        return -np.inf, np.inf
    if dtype.kind == "b":
        return False, True
    return np.iinfo(dtype).min, np.iinfo(dtype).max


Path = tuple[str | int, ...]
"""Place of a subspace: keys of Dicts, positions in Tuples."""

Column = NDArray[Any] | tuple[str, ...]
"""One leaf's values over N lanes: ``(N, *leaf.shape)`` at ``leaf.dtype``, or N strings (Text)."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A subspace other than Dict and Tuple, with its place."""

    path: Path
    spec: LeafSpec
    shape: tuple[int, ...]
    """Shape of one lane's value; ``()`` for Discrete and Text."""
    dtype: np.dtype[Any] | None
    """None for Text."""
    lane_bytes: int = field(init=False, compare=False, repr=False)
    """Size of one lane's array in bytes; 0 for Text."""

    def __post_init__(self) -> None:
        # Computed once: the size of every received batch is checked against it.
        size = 0 if self.dtype is None else self.dtype.itemsize * math.prod(self.shape)
        object.__setattr__(self, "lane_bytes", size)

    @property
    def name(self) -> str:
        """The dotted path, such as ``"camera.depth.0"``; empty at the root."""
        return path_name(self.path)


def path_name(path: Path) -> str:
    return ".".join(map(str, path))


@lru_cache(maxsize=256)
def leaves(spec: SpaceSpec) -> tuple[Leaf, ...]:
    return tuple(_leaves(spec, ()))


def parts_of(spec: SpaceSpec) -> dict[str, SpaceSpec]:
    """Return the subspaces of a Dict or Tuple by their names in paths; empty for a leaf."""
    if isinstance(spec, DictSpec):
        return dict(spec.items)
    parts = spec.items if isinstance(spec, TupleSpec) else ()
    return {str(index): part for index, part in enumerate(parts)}


def with_leaves(spec: SpaceSpec, specs: Iterable[LeafSpec]) -> SpaceSpec:
    left = iter(specs)
    if isinstance(spec, DictSpec):
        return DictSpec(tuple((key, with_leaves(part, left)) for key, part in spec.items))
    if isinstance(spec, TupleSpec):
        return TupleSpec(tuple(with_leaves(part, left) for part in spec.items))
    return next(left)


def _leaves(spec: SpaceSpec, path: Path) -> Iterator[Leaf]:
    match spec:
        case DictSpec(items):
            for key, part in items:
                yield from _leaves(part, (*path, key))
        case TupleSpec(parts):
            for index, part in enumerate(parts):
                yield from _leaves(part, (*path, index))
        case _:
            yield _leaf(spec, path)


def _leaf(spec: LeafSpec, path: Path) -> Leaf:
    match spec:
        case BoxSpec() | MultiDiscreteSpec():
            return Leaf(path, spec, spec.shape, np.dtype(spec.dtype))
        case DiscreteSpec():
            return Leaf(path, spec, (), np.dtype(spec.dtype))
        case MultiBinarySpec():
            return Leaf(path, spec, spec.shape, np.dtype(np.int8))
        case TextSpec():
            return Leaf(path, spec, (), None)
    assert_never(spec)
