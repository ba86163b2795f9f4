"""Reading fields of a decoded body, as strictly in one dialect as in the other."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlmesh_ray.dialects.rllink.wire import messages as m
from rlmesh_ray.errors import CodecError
from rlmesh_ray.wire.msgpack_values import holds_numbers

_MOST_SEQ_NO = 2**53
_MOST_EPISODES = 2**14

Body = Mapping[Any, Any]


def text(body: Body, name: str) -> str | None:
    """Return a short text, or None where there is none.

    Raises:
        CodecError: It is something else.
    """
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= m.LONGEST_TEXT:
        raise CodecError(f"{name} must be a text of 1 to {m.LONGEST_TEXT} characters")
    return value


def required_text(body: Body, name: str) -> str:
    """Return a short text.

    Raises:
        CodecError: It is missing or something else.
    """
    value = text(body, name)
    if value is None:
        raise CodecError(f"{name} is missing")
    return value


def count(body: Body, name: str) -> int | None:
    """Return an integer from 0, or None where there is none.

    Raises:
        CodecError: It is something else.
    """
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST_SEQ_NO:
        raise CodecError(f"{name} must be an integer from 0 to 2**53")
    return value


def flag(body: Body, *names: str) -> bool:
    """Return a truth value, under the first of ``names`` that is there; False if none is.

    Raises:
        CodecError: It is something else.
    """
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, list) and value:
            value = value[-1]  # one a step: older clients
        if isinstance(value, bool | np.bool_):
            return bool(value)
        raise CodecError(f"{name} must be true or false")
    return False


def number(body: Body, name: str) -> float:
    """Return a finite number; 0.0 where there is none.

    Raises:
        CodecError: It is something else.
    """
    value = body.get(name)
    if value is None:
        return 0.0
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    try:
        converted = float(value) if is_number else np.nan
    except (OverflowError, TypeError):  # an integer beyond all floats; a complex number
        converted = np.nan
    if not np.isfinite(converted):
        raise CodecError(f"{name} must be a finite number")
    return converted


def array(value: Any, name: str) -> m.Array:
    """Return what may be numbers in lists of any depth, or an array, as an array.

    Raises:
        CodecError: It is ragged, or holds something else than numbers and truth values.
    """
    try:
        made = np.asarray(value) if holds_numbers(value) else None
    except (ValueError, OverflowError, TypeError, RecursionError) as error:
        raise CodecError(f"{name} cannot be an array: {_first_line(error)}") from error
    if made is None or not m.is_plain(made):
        raise CodecError(f"{name} must hold numbers in lists of equal lengths")
    return made


def stacked(values: Any, name: str) -> m.Array:
    """Return a list of numbers or arrays as one array, with a first axis.

    Raises:
        CodecError: As of ``array``, or it is no list.
    """
    made = array(values, name)
    if made.ndim == 0:
        raise CodecError(f"{name} must be a list")
    return made


def rewards(values: Any) -> m.Array:
    """Return rewards as float64.

    Raises:
        CodecError: They are no list of numbers.
    """
    return stacked(values, "rewards").astype(np.float64)


def episodes(body: Body) -> list[Any]:
    """Return the episodes of a message, unread.

    Raises:
        CodecError: They are no list, or so many that others would have to wait.
    """
    listed = body.get("episodes")
    if not isinstance(listed, list):
        raise CodecError("episodes must be a list")
    if len(listed) > _MOST_EPISODES:
        raise CodecError(f"{len(listed)} episodes at once; send at most {_MOST_EPISODES}")
    return listed


def checked(chunk: m.Chunk) -> m.Chunk:
    """Return ``chunk``.

    Raises:
        CodecError: Its lengths contradict each other.
    """
    fault = m.shape_fault(chunk)
    if fault:
        raise CodecError(fault)
    return chunk


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
