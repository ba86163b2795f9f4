"""Leaves of a space: its subspaces other than Dict and Tuple, in depth-first order."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.spaces.spec import (
    BoxSpec,
    DictSpec,
    DiscreteSpec,
    LeafSpec,
    MultiBinarySpec,
    MultiDiscreteSpec,
    SpaceSpec,
    TextSpec,
    TupleSpec,
)

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
