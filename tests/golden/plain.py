"""Messages as plain JSON, for people to read and for comparing."""

import base64
import dataclasses
import enum
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Return ``value`` with messages as objects and whatever else JSON lacks as lists and texts."""
    if dataclasses.is_dataclass(value):
        return {"is": type(value).__name__} | _fields(value)
    for kinds, told in _PLAIN.items():
        if isinstance(value, kinds):
            return told(value)
    return value


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields that count in comparisons."""
    names = (field.name for field in dataclasses.fields(value) if field.compare)
    return {name: plain(getattr(value, name)) for name in names}


def _mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): plain(value[key]) for key in sorted(value)}


def _sequence(value: Any) -> Any:
    return _mapping(value._asdict()) if hasattr(value, "_asdict") else [plain(v) for v in value]


_PLAIN: dict[Any, Callable[[Any], Any]] = {
    Mapping: _mapping,
    enum.Enum: lambda value: value.name,
    bytes: lambda value: base64.b64encode(value).decode(),
    np.ndarray: lambda value: [str(value.dtype), list(value.shape), value.ravel().tolist()],
    np.generic: lambda value: value.item(),
    (list, tuple, array): _sequence,
}
