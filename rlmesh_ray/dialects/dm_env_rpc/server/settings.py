"""Settings of requests to create, join and reset; any other is refused by name.

None of them chooses what code runs: the operator does.
"""

import contextlib
import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import Array, DataType, kind_of, unpack_tensor
from rlmesh_ray.errors import CodecError
from rlmesh_ray.spaces.vector_infos import CONTAINERS, bounded_repr

MAX_ELEMENTS = 2**20
"""Limit for all settings of a request."""
MAX_EQUAL_ELEMENTS = 2**16
"""Limit for those that one element stands for: a few bytes are enough for any number of them."""

_OPTIONS = "options"
_NO_ARGS = ("", "null", "{}")
"""What remote-gym's client sends as ``args`` where its user gives none."""
_LONGEST_QUOTE = 80
_LARGEST_SEED = 2**63 - 1
_MAX_DEPTH = 16
_MOST_LANES = 2**16


class MissingActions(enum.Enum):
    """How an action is replaced that an agent does not send."""

    HOLD = "hold"
    """The same as in the step before."""
    DEFAULT = "default"
    """The value nearest to zero."""
    ERROR = "error"
    """Its step is refused."""


@dataclass(frozen=True, slots=True)
class ResetOptions:
    """Seeds, options and lanes of a reset."""

    seed: int | tuple[int, ...] | None = None
    """The seed of the first lane that is reset (the next lanes count up from it), or one a lane."""
    options: Mapping[str, object] = field(default_factory=dict)
    lanes: tuple[int, ...] = ()
    """For a batched join: the lanes that are reset, while the others go on; empty: all."""

    def __bool__(self) -> bool:
        return self.seed is not None or bool(self.options) or bool(self.lanes)

    def check(self, num_lanes: int) -> None:
        """Check the numbers of seeds and lanes against the width.

        Raises:
            CodecError: There are seeds for another number of lanes, or there are no such lanes.
        """
        if self.lanes and max(self.lanes) >= num_lanes:
            raise CodecError(
                f"setting 'lanes' has {max(self.lanes)}, and the last lane is {num_lanes - 1}"
            )
        num_lanes = len(self.lanes) or num_lanes
        if isinstance(self.seed, tuple) and len(self.seed) != num_lanes:
            raise CodecError(
                f"setting 'seed' has {len(self.seed)} entries; give one number, or {num_lanes}"
            )


@dataclass(frozen=True, slots=True)
class CreateSettings:
    """Settings of CreateWorld."""

    reset_options: ResetOptions = ResetOptions()
    """Its options are used for every reset, its seed for the first one."""
    missing_actions: MissingActions = MissingActions.HOLD
    min_agents: int = 1
    """How many agents must have joined before a sequence begins."""
    timeout_ms: int = 0
    """Deadline of a step or reset of the environment; 0: there is none."""
    reset_world_timeout_s: float = 60.0
    """How long a ResetWorld waits for agents that do not step."""


@dataclass(frozen=True, slots=True)
class JoinSettings:
    """Settings of JoinWorld: the slot that the agent wants; None: any."""

    lane: int | None = None
    agent: str | None = None
    is_batched: bool = False


def create_settings(settings: Mapping[str, Any]) -> CreateSettings:
    """Return the settings of a CreateWorld (``pb.Tensor`` by key).

    Raises:
        CodecError: One is unknown or malformed.
    """
    plain = plain_settings(settings)
    if isinstance(plain.get("args"), str) and plain["args"] in _NO_ARGS:
        del plain["args"]
    found = _converted(plain, "create", _CREATE)
    return CreateSettings(
        ResetOptions(found.get("seed"), found.get(_OPTIONS, {})),
        found.get("missing_actions", MissingActions.HOLD),
        max(found.get("min_agents", 1), 1),
        math.ceil(found.get("timeout_s", 0.0) * 1000),
        found.get("reset_world_timeout_s", 60.0),
    )


def join_settings(settings: Mapping[str, Any]) -> JoinSettings:
    """Return the settings of a JoinWorld.

    Raises:
        CodecError: One is unknown or malformed.
    """
    found = _converted(plain_settings(settings), "join", _JOIN)
    return JoinSettings(found.get("lane"), found.get("agent"), found.get("batched", False))


def reset_settings(settings: Mapping[str, Any], *, is_batched: bool = False) -> ResetOptions:
    """Return the settings of a Reset or ResetWorld.

    Args:
        settings: ``pb.Tensor`` by key.
        is_batched: Whether it is the Reset of a batched join.

    Raises:
        CodecError: One is unknown or malformed.
    """
    name, kinds = ("batched reset", _BATCHED_RESET) if is_batched else ("reset", _RESET)
    found = _converted(plain_settings(settings), name, kinds)
    return ResetOptions(found.get("seed"), found.get(_OPTIONS, {}), found.get("lanes", ()))


def _converted(
    plain: Mapping[str, object], name: str, kinds: "Mapping[str, _Kind]"
) -> dict[str, Any]:
    """Return the settings of a request; those of ``options.KEY`` are nested under ``options``.

    Args:
        plain: As ``plain_settings`` returns them.
        name: Of the request.
        kinds: The settings that it has.
    """
    found: dict[str, Any] = {}
    for key, value in plain.items():
        prefix, _, path = key.partition(".")
        if prefix == _OPTIONS and path and _OPTIONS_KEY in kinds:
            _put(found.setdefault(_OPTIONS, {}), key, path.split("."), value)
            continue
        if key not in kinds:
            known = ", ".join(kinds)
            raise CodecError(f"there is no {name} setting {_quoted(key)}; there are {known}")
        convert, expected = kinds[key]
        found[key] = convert(value)
        if found[key] is None:
            raise CodecError(f"setting {key!r} is {_quoted(value)}, expected {expected}")
    return found


def as_seed(value: object, name: str) -> int:
    """Return the seed in a property, as a number or as decimal text.

    Raises:
        CodecError: It is no integer, or negative.
    """
    number = _as_seed(value)
    if number is None:
        raise CodecError(f"{name} is {_quoted(value)}, expected an integer from 0 on")
    return number


def _as_seed(value: object) -> int | None:
    number = _as_natural(value)
    return None if number is None or number > _LARGEST_SEED else number


def _as_seeds(value: object) -> int | tuple[int, ...] | None:
    if not _is_vector(value):
        return _as_seed(value)
    seeds = tuple(seed for seed in map(_as_seed, value) if seed is not None)
    return seeds if len(seeds) == len(value) else None


def _as_lanes(value: object) -> tuple[int, ...] | None:
    lanes = tuple(map(_as_natural, value)) if _is_vector(value) else ()
    are_lanes = lanes and None not in lanes and len(set(lanes)) == len(lanes)
    return lanes if are_lanes else None  # type: ignore[return-value]  # without None


def _is_vector(value: object) -> TypeGuard[NDArray[Any]]:
    """Return whether it is an array with one axis, of no more elements than there may be lanes."""
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.size <= _MOST_LANES


def _put(options: dict[str, Any], key: str, path: list[str], value: object) -> None:
    if len(path) > _MAX_DEPTH:
        raise CodecError(f"setting {_quoted(key)} is nested more than {_MAX_DEPTH} deep")
    *parents, last = path
    for parent in parents:
        options = options.setdefault(parent, {})
        if not isinstance(options, dict):
            raise CodecError(f"setting {_quoted(key)} lies below one that is a value itself")
    if last in options:
        raise CodecError(f"setting {_quoted(key)} is there twice")
    options[last] = value


def _as_natural(value: object) -> int | None:
    if isinstance(value, str) and len(value) < 20 and value.isdecimal() and value.isascii():
        return int(value)
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if is_integer or (isinstance(value, float) and value.is_integer()):
        number = int(value)  # type: ignore[call-overload]
        return number if number >= 0 else None
    return None


def _as_seconds(value: object) -> float | None:
    number = math.nan
    if isinstance(value, (int, float, str)):
        with contextlib.suppress(ValueError, OverflowError):
            number = float(value)
    return number if 0 <= number <= 1e6 else None


def _as_missing_actions(value: object) -> MissingActions | None:
    choices = {each.value: each for each in MissingActions}
    return choices.get(value) if isinstance(value, str) else None


_Kind = tuple[Callable[[object], Any], str]
"""A function that returns a setting's value, None where it is of another kind; and its name."""
_NATURAL: _Kind = (_as_natural, "an integer from 0 on")
_SECONDS: _Kind = (_as_seconds, "a number from 0 to 1e6")
_TEXT: _Kind = (lambda value: value if isinstance(value, str) else None, "a STRING")
_FLAG: _Kind = (lambda value: value if isinstance(value, bool) else None, "a BOOL")
_OPTIONS_KEY = f"{_OPTIONS}.KEY"
_RESET: Mapping[str, _Kind] = {
    "seed": (_as_seeds, "an integer from 0 on, or one a lane"),
    _OPTIONS_KEY: (lambda _: None, "a value"),
}
_BATCHED_RESET = {**_RESET, "lanes": (_as_lanes, "a list of different integers from 0 on")}
_CREATE = {
    **_RESET,
    "missing_actions": (
        _as_missing_actions,
        f"one of {[each.value for each in MissingActions]}",
    ),
    "min_agents": _NATURAL,
    "timeout_s": _SECONDS,
    "reset_world_timeout_s": _SECONDS,
}
_JOIN = {"lane": _NATURAL, "agent": _TEXT, "batched": _FLAG}


def _quoted(value: object) -> str:
    # A few bytes can stand for a list of a million long texts.
    text = bounded_repr(value) if isinstance(value, CONTAINERS) else repr(value)
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}..."


def plain_settings(settings: Mapping[str, Any]) -> dict[str, object]:
    """Return ``settings``, ``pb.Tensor`` by key, as plain values.

    Returns:
        By key: Python scalars and strings, lists of strings, arrays of numbers.

    Raises:
        CodecError: One is malformed, or holds messages, or there is too much of them.
    """
    plain = {}
    room = MAX_ELEMENTS
    for key in settings:
        array = _array(f"setting {key!r}", settings[key], room)
        plain[key] = _plain(array)
        room -= array.size
    return plain


def plain_setting(name: str, tensor: Any) -> object:
    """Return one setting, or the value of a property; errors have its ``name``.

    Raises:
        CodecError: It is malformed, or holds messages, or too much.
    """
    return _plain(_array(name, tensor, MAX_ELEMENTS))


def _array(name: str, tensor: Any, max_elements: int) -> Array:
    if kind_of(tensor, name) is DataType.PROTO:
        raise CodecError(f"{name} holds a message; give numbers or text")
    array = unpack_tensor(tensor, name)
    # Strings become lists, also those without an element: an axis of 0 does not bound the others.
    size = array.size or math.prod(axis for axis in array.shape if axis)
    if size > max_elements:
        raise CodecError(
            f"{name} has {size} elements, and one request may have {MAX_ELEMENTS} in all"
        )
    if 0 in array.strides and array.size > MAX_EQUAL_ELEMENTS:
        raise CodecError(
            f"{name} stands for {array.size} equal elements, and {MAX_EQUAL_ELEMENTS} are the limit"
        )
    return array


def _plain(array: Array) -> object:
    if not array.ndim:
        value: object = array.item()
        return value
    return array.tolist() if array.dtype == object else array.copy()
