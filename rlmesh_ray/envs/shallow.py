"""Cuts off what is nested deeper than pickle, which recurses, can follow."""

import dataclasses
from typing import Any

import numpy as np

MAX_DEPTH = 64
"""More than any message on the wire can have."""


def shallow(message: Any) -> Any:
    """Return ``message`` with the names of classes in place of containers below ``MAX_DEPTH``.

    Args:
        message: A dataclass with dicts, lists, tuples and arrays of objects in each other in its
            fields; everything else is kept as it is. Parts that occur several times are looked
            at once a level.
    """
    cutter = _Cutter()
    names = [field.name for field in dataclasses.fields(message)]
    return type(message)(**{name: cutter.cut(getattr(message, name), MAX_DEPTH) for name in names})


class _Cutter:
    def __init__(self) -> None:
        self._done: dict[tuple[int, int], Any] = {}

    def cut(self, value: Any, depth: int) -> Any:
        key = (id(value), depth)
        if key not in self._done:
            is_deep = depth == 0 and _is_container(value)
            self._done[key] = f"<{type(value).__name__}>" if is_deep else self._cut(value, depth)
        return self._done[key]

    def _cut(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict):
            return {key: self.cut(part, depth - 1) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.cut(part, depth - 1) for part in value]
        if not _is_container(value):
            return value
        array = np.empty(value.shape, object)
        for index, part in np.ndenumerate(value):
            array[index] = self.cut(part, depth - 1)
        return array


def _is_container(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return bool(value.dtype == object)
    return isinstance(value, (dict, list, tuple))
