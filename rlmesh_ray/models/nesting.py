"""Values nested in dicts and tuples, such as a module's inputs, outputs and states."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


def form(value: Any) -> tuple[Any, ...]:
    """Return what two batches of one form have in common: keys in their order, and leaves.

    Of a tensor its dtype and the shape of a row.
    """
    if hasattr(value, "dtype"):
        return value.dtype, value.shape[1:]
    if isinstance(value, Mapping):
        return tuple((key, form(part)) for key, part in value.items())
    if isinstance(value, tuple | list):
        return tuple((form(part),) for part in value)
    return (type(value),)


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, tuple | list):
        yield value
        return
    for part in value:
        yield from leaves(part)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return the results for what is nested, in dicts and tuples as it is."""
    if isinstance(value, Mapping):
        return {key: mapped(function, part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return tuple(mapped(function, part) for part in value)
    return function(value)


def filled(nesting: Any, values: Iterable[Any]) -> Any:
    following = iter(values)
    return mapped(lambda _: next(following), nesting)


def describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {describe(part)}" for key, part in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(describe(part) for part in value) + ")"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return type(value).__name__
