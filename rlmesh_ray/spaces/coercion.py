"""Coercion of values to the exact dtype and shape of their leaf (edition: "Dtype conformance").

Integers are never truncated or wrapped silently. An array that fits already is not copied.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import ConformanceError
from rlmesh_ray.spaces.leaves import Leaf
from rlmesh_ray.spaces.spec import BoxSpec, DiscreteSpec


def coerce(leaf: Leaf, value: Any, num_lanes: int | None) -> Any:
    """Return ``value`` at the leaf's exact dtype and shape.

    Bounds and domains are not checked here; see ``validation.check``.

    Args:
        leaf: The leaf that the value belongs to.
        value: Array, scalar or sequence; for Text a string or a sequence of strings.
        num_lanes: Number of lanes of a batch; None for the value of a single lane.

    Returns:
        For a batch a column: ``(num_lanes, *leaf.shape)``, or a tuple of strings. For one
        lane ``leaf.shape``, a NumPy scalar for Discrete, or a string. An array that fits
        already is returned itself.

    Raises:
        ConformanceError: Wrong shape or not an array at all (``"structure"``), or a number
            that the dtype cannot hold: not finite, not integral, out of its range
            (``"dtype"``).
    """
    if leaf.dtype is None:
        return _text(leaf, value) if num_lanes is None else _texts(leaf, value, num_lanes)
    shape = leaf.shape if num_lanes is None else (num_lanes, *leaf.shape)
    array = value
    if type(value) is not np.ndarray or value.dtype != leaf.dtype or value.shape != shape:
        array = as_array(leaf, value)
        if array.shape != shape:
            reason = f"has shape {array.shape}, expected {shape}"
            raise ConformanceError("structure", leaf.name, reason)
        array = _cast(leaf, array, leaf.dtype)
    return array[()] if num_lanes is None and isinstance(leaf.spec, DiscreteSpec) else array


def drop_unit_axis(leaf: Leaf, value: Any, num_axes: int = 1) -> Any:
    """Return an action of RLlib's in the leaf's shape: a number without an axis of length 1.

    RLlib's modules give a Box of shape ``()`` the shape ``(1,)``.

    Args:
        leaf: The leaf that the value belongs to.
        value: Of any shape; all others are returned unchanged.
        num_axes: Number of axes before those of the leaf, such as 1 for a batch.

    Raises:
        ConformanceError: It is no array, such as lists of unequal lengths.
    """
    if leaf.shape or not isinstance(leaf.spec, BoxSpec):
        return value
    array = as_array(leaf, value)
    return array[..., 0] if array.shape[num_axes:] == (1,) else value


def as_array(leaf: Leaf, value: Any) -> NDArray[Any]:
    """Return a leaf's value as an array, without the loss of integers beyond 2**53.

    Raises:
        ConformanceError: It is no array, such as lists of unequal lengths.
    """
    if isinstance(value, np.ndarray):
        if value.dtype != object:
            return value
        value = value.tolist()  # NumPy then infers the dtype from the elements
    try:
        array = np.asarray(value)
        if _may_have_lost_integers(leaf, array, value):
            array = _exact_integers(leaf, value, array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConformanceError("structure", leaf.name, f"is no array: {error}") from error
    return array


def _may_have_lost_integers(leaf: Leaf, array: NDArray[Any], value: Any) -> bool:
    # NumPy reads [2**63 + 1, 1] as float64: the first one would be off by one.
    return (
        leaf.dtype is not None
        and leaf.dtype.kind in "iu"
        and array.dtype.kind in "fO"
        and not isinstance(value, np.generic)
    )


def _exact_integers(leaf: Leaf, value: Any, array: NDArray[Any]) -> NDArray[Any]:
    """Return ``value`` as an integer array if it holds nothing but integers, else ``array``."""
    objects = np.asarray(value, dtype=object)
    if not all(isinstance(item, (int, np.integer)) for item in objects.flat):
        return array
    try:
        return objects.astype(leaf.dtype)
    except OverflowError as error:
        raise ConformanceError("dtype", leaf.name, f"does not fit {leaf.dtype}: {error}") from error


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
    low, high = _limits(target)
    wide = array.astype(np.float64) if array.dtype.itemsize < 8 else array
    # high + 1 is a power of two and therefore exact as a float; high itself may not be.
    fits = (wide >= float(low)) & (wide < float(high + 1)) & (wide == np.trunc(wide))
    if not fits.all():
        _refuse(leaf, array, fits, target)


def _check_range(leaf: Leaf, array: NDArray[Any], target: np.dtype[Any]) -> None:
    low, high = _limits(target)
    if array.size and (int(array.min()) < low or int(array.max()) > high):
        # Not every NumPy compares an array with an integer outside its dtype's range.
        own_low, own_high = _limits(array.dtype)
        fits = (array >= max(low, own_low)) & (array <= min(high, own_high))
        _refuse(leaf, array, fits, target)


def _limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    if dtype.kind == "b":
        return 0, 1
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


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
