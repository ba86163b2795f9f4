"""Observation batches for checks of models: rows that differ, with moderate values."""

from typing import Any

import numpy as np

from rlmesh_ray.compliance.action_cases import conforming
from rlmesh_ray.spaces.batch import Column, Leaf, leaves
from rlmesh_ray.spaces.spec import BoxSpec, DiscreteSpec, MultiDiscreteSpec, SpaceSpec, TextSpec

# Largest offset of a Box's integers: the range of a pixel.
_MOST_STEPS_UP = 255
# Largest offset of a Text's length from its minimum.
_MOST_LETTERS = 8


def varied(spec: SpaceSpec, num_rows: int, seed: int) -> list[Column]:
    """Return columns of ``num_rows`` random observations within ``spec``.

    Numbers stay near zero also where bounds are at the end of the dtype, since a policy may
    overflow for values that no environment has.
    """
    rng = np.random.default_rng(seed)
    rest = conforming(spec, num_rows)
    return [_drawn(leaf, column, rng) for leaf, column in zip(leaves(spec), rest, strict=True)]


def rows(columns: list[Column], *chosen: int) -> list[Column]:
    """Return the ``chosen`` rows of a batch, in that order."""
    return [
        tuple(column[row] for row in chosen) if isinstance(column, tuple) else column[list(chosen)]
        for column in columns
    ]


def _drawn(leaf: Leaf, rest: Column, rng: np.random.Generator) -> Column:
    spec = leaf.spec
    if isinstance(spec, TextSpec):
        return tuple(_text(spec, rng) for _ in rest)
    assert not isinstance(rest, tuple)
    if isinstance(spec, BoxSpec):
        return _in_box(spec, rest, rng)
    if isinstance(spec, DiscreteSpec):
        return (spec.start + rng.integers(0, spec.n, rest.shape)).astype(rest.dtype)
    if isinstance(spec, MultiDiscreteSpec):
        domain = np.array(spec.nvec, np.int64).reshape(spec.shape)
        return rng.integers(0, domain, rest.shape).astype(rest.dtype)
    return rng.integers(0, 2, rest.shape).astype(rest.dtype)


def _in_box(spec: BoxSpec, rest: Any, rng: np.random.Generator) -> Column:
    low: Any
    high: Any
    drawn: Column
    low, high = spec.bounds()
    if rest.dtype.kind == "b":
        drawn = np.clip(rng.integers(0, 2, rest.shape).astype(rest.dtype), low, high)
    elif rest.dtype.kind in "iu":
        steps = np.minimum(high - rest, _MOST_STEPS_UP).astype(np.int64)
        drawn = rest + rng.integers(0, steps + 1).astype(rest.dtype)
    else:
        noise = rng.uniform(-1.0, 1.0, rest.shape).astype(rest.dtype)
        drawn = np.clip(rest + noise, low, high)
    return drawn


def _text(spec: TextSpec, rng: np.random.Generator) -> str:
    letters = spec.charset or "abcdefgh"
    longest = min(spec.max_length, spec.min_length + _MOST_LETTERS)
    length = int(rng.integers(spec.min_length, longest + 1))
    return "".join(letters[int(rng.integers(len(letters)))] for _ in range(length))
