"""Batches as columns: conversion between nested values and lists of leaves.

A batch over N lanes is a list of columns, one for each leaf of the space. The value that users see,
batched or of one lane, nests the same leaves as the space does.

``coerce`` converts a value to the exact dtype and shape of its leaf (edition: "Dtype conformance"):
integers are never truncated or wrapped silently, and an array that fits already is not copied.
Further functions join and split batches, and replace and write lanes.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import ConformanceError
from rlmesh_ray.spaces.spec import (
    BoxSpec,
    DictSpec,
    DiscreteSpec,
    Path,
    SpaceSpec,
    TupleSpec,
    extremes,
    path_name,
)

# Imported from here by those that work on batches, too.
from rlmesh_ray.spaces.spec import Column as Column
from rlmesh_ray.spaces.spec import Leaf as Leaf
from rlmesh_ray.spaces.spec import leaves as leaves


def coerce(leaf: Leaf, value: Any, num_lanes: int | None) -> Any:
    """Return ``value`` at the leaf's exact dtype and shape; bounds are for ``validation.Checker``.

    For a batch of ``num_lanes`` that is a column: ``(num_lanes, *leaf.shape)``, or a tuple of
    strings. For one lane (None) it is ``leaf.shape``, a NumPy scalar for Discrete, or a string. An
    array that fits already is returned itself. ConformanceError is about the ``"structure"``, or
    the ``"dtype"``, which cannot hold a number: not finite, not integral, out of its range.
    """
    if leaf.dtype is None:
        return _text(leaf, value) if num_lanes is None else _texts(leaf, value, num_lanes)
    is_number = num_lanes is None and isinstance(leaf.spec, DiscreteSpec)
    if is_number and type(value) is leaf.dtype.type:
        return value
    shape = leaf.shape if num_lanes is None else (num_lanes, *leaf.shape)
    array = value
    if type(value) is not np.ndarray or value.dtype != leaf.dtype or value.shape != shape:
        array = as_array(leaf, value)
        if array.shape != shape:
            reason = f"has shape {array.shape}, expected {shape}"
            raise ConformanceError("structure", leaf.name, reason)
        array = _cast(leaf, array, leaf.dtype)
    return array[()] if is_number else array


def drop_unit_axis(leaf: Leaf, value: Any, num_axes: int = 1) -> Any:
    """Return an action of RLlib's in the leaf's shape: a number without an axis of length 1.

    RLlib's modules give a Box of shape ``()`` the shape ``(1,)``. ``num_axes`` stand before the
    leaf's, such as 1 for a batch. Raises ConformanceError for lists of unequal lengths.
    """
    if leaf.shape or not isinstance(leaf.spec, BoxSpec):
        return value
    array = as_array(leaf, value)
    return array[..., 0] if array.shape[num_axes:] == (1,) else value


def as_array(leaf: Leaf, value: Any) -> NDArray[Any]:
    """Return an array that keeps integers beyond 2**53; raises ConformanceError."""
    if isinstance(value, np.ndarray):
        if value.dtype != object:
            return value
        value = value.tolist()  # NumPy then infers the dtype from the elements
    try:
        array = np.asarray(value)
        is_of_integers = leaf.dtype is not None and leaf.dtype.kind in "iu"
        # NumPy reads [2**63 + 1, 1] as float64: the first one would be off by one.
        if is_of_integers and array.dtype.kind in "fO" and not isinstance(value, np.generic):
            objects = np.asarray(value, dtype=object)
            if all(isinstance(item, (int, np.integer)) for item in objects.flat):
                array = objects.astype(leaf.dtype)
    except OverflowError as error:
        raise ConformanceError("dtype", leaf.name, f"does not fit {leaf.dtype}: {error}") from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConformanceError("structure", leaf.name, f"is not an array: {error}") from error
    return array


def _cast(leaf: Leaf, array: NDArray[Any], target: np.dtype[Any]) -> NDArray[Any]:
    source = array.dtype
    if source == target:
        return array
    if source.kind not in "biuf":
        raise ConformanceError("dtype", leaf.name, f"{source} cannot become {target}")
    if target.kind == "f":
        with np.errstate(over="ignore"):  # the edition allows a narrowing to lose precision
            return array.astype(target)
    if source.kind == "f":
        _check_integral(leaf, array, target)
    elif source.kind in "iu":
        _check_range(leaf, array, target)
    return array.astype(target)


def _check_integral(leaf: Leaf, array: NDArray[Any], target: np.dtype[Any]) -> None:
    low, high = extremes(target)
    wide = array.astype(np.float64) if array.dtype.itemsize < 8 else array
    # high + 1 is a power of two and therefore exact as a float; high itself may not be.
    fits = (wide >= float(low)) & (wide < float(high + 1)) & (wide == np.trunc(wide))
    if not fits.all():
        _refuse(leaf, array, fits, target)


def _check_range(leaf: Leaf, array: NDArray[Any], target: np.dtype[Any]) -> None:
    low, high = extremes(target)
    if array.size and (int(array.min()) < low or int(array.max()) > high):
        # Not every NumPy compares an array with an integer outside its dtype's range.
        own_low, own_high = extremes(array.dtype)
        fits = (array >= max(low, own_low)) & (array <= min(high, own_high))
        _refuse(leaf, array, fits, target)


def _refuse(leaf: Leaf, array: NDArray[Any], fits: NDArray[Any], target: np.dtype[Any]) -> NoReturn:
    offender = array.ravel()[int(np.argmin(fits))]
    raise ConformanceError("dtype", leaf.name, f"{offender} cannot be held exactly by {target}")


def _text(leaf: Leaf, value: Any) -> str:
    if not isinstance(value, str):
        reason = f"is {type(value).__name__}, expected a string"
        raise ConformanceError("structure", leaf.name, reason)
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = f"has no UTF-8 form: {error.reason} at {error.start}"
        raise ConformanceError("structure", leaf.name, reason) from error
    return text


def _texts(leaf: Leaf, value: Any, num_lanes: int) -> tuple[str, ...]:
    is_batch = isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, (str, bytes))
    if not is_batch or len(value) != num_lanes:
        found = f"{len(value)} entries" if is_batch else type(value).__name__
        raise ConformanceError("structure", leaf.name, f"is {found}, expected {num_lanes} strings")
    return tuple(_text(leaf, text) for text in value)


def flatten(spec: SpaceSpec, value: Any) -> list[Any]:
    """Return the leaves of ``value``, unconverted, in the order of ``leaves(spec)``.

    The value is a batch or that of one lane. Keys that the space does not declare are left out;
    ConformanceError (``"structure"``) says what is missing, or has another form.
    """
    if not isinstance(spec, (DictSpec, TupleSpec)):
        return [value]
    found: list[Any] = []
    _flatten(spec, value, (), found)
    return found


def unflatten(spec: SpaceSpec, leaf_values: Sequence[Any]) -> Any:
    """Nest a value for each leaf as ``spec`` does; raises ValueError for more or fewer of them."""
    is_leaf = not isinstance(spec, (DictSpec, TupleSpec))
    expected = 1 if is_leaf else len(leaves(spec))
    if len(leaf_values) != expected:
        raise ValueError(f"{len(leaf_values)} values for {expected} leaves")
    return leaf_values[0] if is_leaf else _unflatten(spec, iter(leaf_values))


def by_leaf(spec: SpaceSpec, values: Sequence[Any]) -> list[Sequence[Any]]:
    """Return for each leaf its values, one for each lane, unconverted; raises ConformanceError."""
    if not isinstance(spec, (DictSpec, TupleSpec)):
        return [values]
    lanes = [flatten(spec, value) for value in values]
    return [[parts[index] for parts in lanes] for index in range(len(leaves(spec)))]


def by_lane(spec: SpaceSpec, columns: Sequence[Column]) -> Iterator[Any]:
    """Yield the value of each lane as gymnasium's vectors hand it to their environments.

    Arrays of more than one axis yield views.
    """
    if isinstance(spec, (DictSpec, TupleSpec)):
        return (_unflatten(spec, iter(values)) for values in zip(*columns, strict=True))
    return iter(columns[0])


def empty_columns(spec: SpaceSpec, num_lanes: int) -> list[Column]:
    """Return new columns over ``num_lanes`` lanes: zeros, and empty strings."""
    return [
        ("",) * num_lanes if leaf.dtype is None else np.zeros((num_lanes, *leaf.shape), leaf.dtype)
        for leaf in leaves(spec)
    ]


def stack(spec: SpaceSpec, values: Sequence[Any]) -> list[Column]:
    """Return the columns of a batch with one lane for each value; raises ConformanceError."""
    columns: list[Column] = []
    for leaf, own in zip(leaves(spec), by_leaf(spec, values), strict=True):
        if leaf.dtype is None:
            columns.append(tuple(coerce(leaf, part, None) for part in own))
            continue
        column = np.empty((len(own), *leaf.shape), leaf.dtype)
        for lane, part in enumerate(own):
            column[lane] = coerce(leaf, part, None)
        columns.append(column)
    return columns


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


def concatenate(batches: Sequence[Sequence[Column]]) -> list[Column]:
    """Return one batch with the lanes of all ``batches``, in order; a single one is not copied."""
    if len(batches) == 1:
        return list(batches[0])
    joined: list[Column] = []
    for columns in zip(*batches, strict=True):
        if isinstance(columns[0], tuple):
            joined.append(tuple(text for column in columns for text in column))
        else:
            joined.append(np.concatenate(columns))
    return joined


def split(columns: Sequence[Column], counts: Sequence[int]) -> list[list[Column]]:
    """Split a batch into one batch for each of ``counts``, with that many lanes, as views."""
    ends = list(accumulate(counts))
    return [
        [column[end - count : end] for column in columns]
        for end, count in zip(ends, counts, strict=True)
    ]


def chunk_steps(leaf: Leaf, value: Any, num_rows: int, horizon: int) -> list[Any]:
    """Split chunks ``(rows, horizon, *leaf.shape)`` by step; raises ConformanceError."""
    wanted = (num_rows, horizon, *leaf.shape)
    problem = ""
    try:
        array = value if hasattr(value, "shape") else as_array(leaf, value)
    except ConformanceError as error:  # of unequal lengths
        problem = error.reason
    else:
        if tuple(array.shape) != wanted:
            problem = f"has shape {tuple(array.shape)}"
    if problem:
        reason = f"{problem}, expected {wanted} (rows, horizon, *action)"
        raise ConformanceError("structure", leaf.name, reason)
    return [array[:, step] for step in range(horizon)]


def horizon_hint(shape: Sequence[int], expected: Sequence[int]) -> str:
    """Return the remedy where an array of single actions has an axis for a chunk; else empty."""
    if len(shape) < 2 or (shape[0], *shape[2:]) != tuple(expected):
        return ""
    length = shape[1]
    return f"; if the policy chooses {length} actions at once, give horizon={length} (--horizon)"


def replace_lanes(
    columns: Sequence[Column], other: Sequence[Column], lanes: Sequence[int]
) -> list[Column]:
    """Return ``columns``, whose arrays are changed in place, with the ``lanes`` of ``other``."""
    merged: list[Column] = []
    for column, source in zip(columns, other, strict=True):
        if isinstance(column, tuple):
            merged.append(
                tuple(source[lane] if lane in lanes else text for lane, text in enumerate(column))
            )
        else:
            column[list(lanes)] = np.asarray(source)[list(lanes)]
            merged.append(column)
    return merged


def write_lane_values(
    leaf: Leaf, column: Column, lanes: Sequence[int], values: Sequence[Any]
) -> Column:
    """Coerce one value for each of ``lanes`` into ``column``; return it, or a new tuple for text.

    ConformanceError is about the first value that cannot be coerced; an array may hold some of the
    others by then.
    """
    if isinstance(column, tuple):
        strings = list(column)
        for lane, value in zip(lanes, values, strict=True):
            strings[lane] = coerce(leaf, value, None)
        return tuple(strings)
    put_all = _put_arrays if leaf.shape else _put_numbers
    if lanes != range(len(column)) or not put_all(column, values):
        for lane, value in zip(lanes, values, strict=True):
            column[lane] = coerce(leaf, value, None)
    return column


def _put_numbers(column: NDArray[Any], values: Sequence[Any]) -> bool:
    """Write all scalars in one call; return False, unwritten, if they have another dtype."""
    kinds = set(map(type, values))
    if kinds != {column.dtype.type} and (kinds != {int} or column.dtype != np.int64):
        return False
    try:
        column[...] = values
    except OverflowError:
        return False
    return True


def _put_arrays(column: NDArray[Any], values: Sequence[Any]) -> bool:
    """Write all arrays in one call; return False if one has another dtype or shape."""
    array, dtype, shape = np.ndarray, column.dtype, column.shape[1:]
    if not column.size or not column.flags.c_contiguous:
        return False
    if [v for v in values if type(v) is not array or v.dtype is not dtype or v.shape != shape]:
        return False
    # Several times faster than numpy.stack.
    np.concatenate(values, out=column.reshape(-1, *shape[1:]))
    return True
