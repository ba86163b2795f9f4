"""Specs: descriptions of spaces without gymnasium, as values that compare, hash and pickle.

A spec describes one lane. ``wire`` encodes specs, ``spaces.gym_conversion`` converts them from and
to gymnasium spaces; everything between works on specs alone.
"""

from dataclasses import dataclass

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
