"""Batches as columns: conversion between nested values and lists of leaves.

A batch over N lanes is a list of columns, one for each leaf of the space. The value that users see,
batched or of one lane, nests the same leaves as the space does.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlmesh_ray.errors import ConformanceError
from rlmesh_ray.spaces.coercion import coerce
from rlmesh_ray.spaces.leaves import Column, Leaf, Path, leaves, path_name
from rlmesh_ray.spaces.spec import DictSpec, SpaceSpec, TupleSpec

__all__ = [
    "Column",
    "Leaf",
    "by_lane",
    "by_leaf",
    "empty_columns",
    "flatten",
    "leaves",
    "stack",
    "unflatten",
]


def flatten(spec: SpaceSpec, value: Any) -> list[Any]:
    """Return the leaves of ``value``, unconverted, in the order of ``leaves(spec)``.

    Args:
        spec: Space of one lane.
        value: Value of one lane, or a batch; keys that the space does not declare are left out.

    Raises:
        ConformanceError: ``"structure"``: a key is missing, a Tuple has the wrong arity, or
            there is no mapping or sequence where the space has one.
    """
    if not isinstance(spec, (DictSpec, TupleSpec)):
        return [value]
    found: list[Any] = []
    _flatten(spec, value, (), found)
    return found


def unflatten(spec: SpaceSpec, leaf_values: Sequence[Any]) -> Any:
    """Nest ``leaf_values`` as ``spec`` does: dicts in spec order, tuples, bare leaves.

    Args:
        spec: Space of one lane.
        leaf_values: One entry for each leaf: columns, or values of one lane.

    Raises:
        ValueError: There are more or fewer values than leaves.
    """
    is_leaf = not isinstance(spec, (DictSpec, TupleSpec))
    expected = 1 if is_leaf else len(leaves(spec))
    if len(leaf_values) != expected:
        raise ValueError(f"{len(leaf_values)} values for {expected} leaves")
    return leaf_values[0] if is_leaf else _unflatten(spec, iter(leaf_values))


def by_leaf(spec: SpaceSpec, values: Sequence[Any]) -> list[Sequence[Any]]:
    """Return for each leaf the list of its values, one for each lane, unconverted.

    Args:
        spec: Space of one lane.
        values: One value for each lane.

    Raises:
        ConformanceError: As ``flatten``, for the first value of another structure.
    """
    if not isinstance(spec, (DictSpec, TupleSpec)):
        return [values]
    lanes = [flatten(spec, value) for value in values]
    return [[parts[index] for parts in lanes] for index in range(len(leaves(spec)))]


def by_lane(spec: SpaceSpec, columns: Sequence[Column]) -> Iterator[Any]:
    """Yield the value of each lane as gymnasium's vectors hand it to their environments.

    Args:
        spec: Space of one lane.
        columns: One column for each leaf; arrays of more than one axis yield views.
    """
    if isinstance(spec, (DictSpec, TupleSpec)):
        return (_unflatten(spec, iter(values)) for values in zip(*columns, strict=True))
    return iter(columns[0])


def empty_columns(spec: SpaceSpec, num_lanes: int) -> list[Column]:
    """Return new columns over ``num_lanes`` lanes: zeros, and empty strings."""
    return [_empty_column(leaf, num_lanes) for leaf in leaves(spec)]


def stack(spec: SpaceSpec, values: Sequence[Any]) -> list[Column]:
    """Return the columns of a batch with one lane for each of ``values``.

    Args:
        spec: Space of one lane.
        values: One value for each lane.

    Raises:
        ConformanceError: A value has the wrong structure, shape or dtype.
    """
    parts = zip(leaves(spec), by_leaf(spec, values), strict=True)
    return [_stack_leaf(leaf, own) for leaf, own in parts]


def _flatten(spec: SpaceSpec, value: Any, path: Path, found: list[Any]) -> None:
    if isinstance(spec, DictSpec):
        if not isinstance(value, Mapping):
            raise _misfit(path, f"is {type(value).__name__}, expected a mapping")
        for key, part in spec.items:
            if key not in value:
                raise _misfit(path, f"has no key {key!r}")
            _flatten(part, value[key], (*path, key), found)
    elif isinstance(spec, TupleSpec):
        _check_arity(value, len(spec.items), path)
        for index, part in enumerate(spec.items):
            _flatten(part, value[index], (*path, index), found)
    else:
        found.append(value)


def _check_arity(value: Any, arity: int, path: Path) -> None:
    # gymnasium takes lists and arrays for tuples as well.
    is_array = isinstance(value, np.ndarray) and value.ndim > 0
    if not is_array and not isinstance(value, (tuple, list)):
        raise _misfit(path, f"is {type(value).__name__}, expected a tuple")
    if len(value) != arity:
        raise _misfit(path, f"has {len(value)} parts, expected {arity}")


def _misfit(path: Path, reason: str) -> ConformanceError:
    return ConformanceError("structure", path_name(path), reason)


def _unflatten(spec: SpaceSpec, leaf_values: Iterator[Any]) -> Any:
    if isinstance(spec, DictSpec):
        return {key: _unflatten(part, leaf_values) for key, part in spec.items}
    if isinstance(spec, TupleSpec):
        return tuple(_unflatten(part, leaf_values) for part in spec.items)
    return next(leaf_values)


def _empty_column(leaf: Leaf, num_lanes: int) -> Column:
    if leaf.dtype is None:
        return ("",) * num_lanes
    return np.zeros((num_lanes, *leaf.shape), leaf.dtype)


def _stack_leaf(leaf: Leaf, parts: Sequence[Any]) -> Column:
    if leaf.dtype is None:
        return tuple(coerce(leaf, part, None) for part in parts)
    column = np.empty((len(parts), *leaf.shape), leaf.dtype)
    for lane, part in enumerate(parts):
        column[lane] = coerce(leaf, part, None)
    return column
