"""Conformance checks: whether values lie in their space (edition: "Value Conformance").

Structural violations are always rejected; the validation mode decides about range violations.

Inside an endpoint, warnings about values that are delivered out of their range are entries of
the infos: ``ConformanceWarning`` values under ``WARNING_KEY``. Each dialect has its own form of
them for clients (edition 2026.06, "Conformance warnings").
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn, Self, assert_never

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import ConfigurationError, ConformanceError
from rlmesh_ray.spaces.batch import coerce, flatten
from rlmesh_ray.spaces.spec import (
    BoxSpec,
    Column,
    DictSpec,
    DiscreteSpec,
    Leaf,
    MultiBinarySpec,
    MultiDiscreteSpec,
    SpaceSpec,
    TextSpec,
    TupleSpec,
    extremes,
    leaves,
)
from rlmesh_ray.spaces.vector_infos import lane_entries

_FEW = 1024
"""Up to this many numbers, a dot product takes half the time of a minimum."""


class ValidationMode(enum.Enum):
    """The edition's validation policy: the treatment of values out of their range."""

    WARN = "warn"
    """Deliver it and report it."""
    STRICT = "strict"
    """Reject it."""
    OFF = "off"
    """Do not check ranges."""

    @classmethod
    def from_option(cls, validation: str) -> Self:
        """Return the mode that an option names.

        Raises:
            ConfigurationError: It names none.
        """
        try:
            return cls(validation)
        except ValueError:
            choices = ", ".join(validation.value for validation in cls)
            raise ConfigurationError(f"validation={validation!r} is not one of {choices}") from None


@dataclass(frozen=True, slots=True)
class ConformanceWarning:
    """A value out of its range, which was delivered, or which has truncated its episode."""

    side: str
    """Kind of value: ``"action"``, ``"observation"`` or ``"reward"``."""
    kind: str
    """``"range"`` for a Box, ``"length"`` or ``"charset"`` for a Text; ``"truncated"``: the value
    was not delivered (``on_bad_value``)."""
    path: str
    """Dotted path of the leaf, such as ``"camera.depth"``; empty at the root."""
    detail: str
    """What was found and what was expected, as part of a sentence."""
    lane: int = field(default=0, compare=False)
    """Lane of the first such value; ``detail`` names it, too."""

    @property
    def text(self) -> str:
        place = f"{self.side}.{self.path}" if self.path else self.side
        return f"{place}: {self.detail}"

    @property
    def entries(self) -> dict[str, str]:
        """The warning as a map with a JSON-like path, whose root is ``$``."""
        path = f"$.{self.path}" if self.path else "$"
        return {"path": path, "kind": self.side, "detail": f"{path}: {self.detail}"}


def coerce_batch(spec: SpaceSpec, value: Any, num_lanes: int) -> list[Column]:
    """Return the columns of a batched value, at the exact dtypes of the space of one lane.

    It has the form of gymnasium's vector environments: every leaf ``(num_lanes, *shape)``, for Text
    a sequence of ``num_lanes`` strings. Raises ConformanceError as ``coerce`` does.
    """
    if not isinstance(spec, (DictSpec, TupleSpec)):
        return [coerce(leaves(spec)[0], value, num_lanes)]
    parts = zip(leaves(spec), flatten(spec, value), strict=True)
    return [coerce(leaf, part, num_lanes) for leaf, part in parts]


class Checker:
    """Checks batches of one space: structural rules always, range rules as ``validation`` says."""

    def __init__(
        self, leaves_: Sequence[Leaf], validation: ValidationMode, side: str = "observation"
    ) -> None:
        is_range_checked = validation is not ValidationMode.OFF
        rules = [_rule(leaf, side, is_range_checked) for leaf in leaves_]
        # Leaves of which every value is allowed are left out.
        self._rules = [(place, *rule) for place, rule in enumerate(rules) if rule]
        self._is_strict = validation is ValidationMode.STRICT

    def check(self, columns: Sequence[Column]) -> list[ConformanceWarning]:
        """Return the range violations of coerced columns, at most one for each kind and leaf.

        ConformanceError is about the ``"structure"``: NaN, or an element outside the domain of
        its Discrete, MultiDiscrete or MultiBinary; with STRICT also about a value's ``"range"``.
        """
        found: list[ConformanceWarning] = []
        for place, is_broken, explain in self._rules:
            if is_broken(columns[place]):
                found += explain(columns[place])
        if found and self._is_strict:
            raise _rejected(found[0])
        return found


def check_rewards(
    rewards: NDArray[np.float64], validation: ValidationMode
) -> list[ConformanceWarning]:
    """Check that rewards ``(num_lanes,)`` are finite, which no space demands and learners need.

    With WARN the first that is not is returned; with STRICT it raises ConformanceError.
    """
    is_finite = np.isfinite(rewards)
    if validation is ValidationMode.OFF or np.count_nonzero(is_finite) == is_finite.size:
        return []
    lane = int(is_finite.argmin())
    detail = f"{rewards[lane]} is not finite (lane {lane})"
    found = ConformanceWarning("reward", "range", "", detail, lane)
    if validation is ValidationMode.STRICT:
        raise _rejected(found)
    return [found]


def _rejected(found: ConformanceWarning) -> ConformanceError:
    return ConformanceError("range", found.path, found.detail, found.lane)


@lru_cache(maxsize=256)
def structure_checker(spec: SpaceSpec) -> Checker:
    return Checker(leaves(spec), ValidationMode.OFF)


_IsBroken = Callable[[Any], bool]
"""Whether a column has a value that is not allowed: one call, since it looks at every batch."""
_Explain = Callable[[Any], list[ConformanceWarning]]
"""Returns the range violations of a column that breaks its rule; raises ConformanceError."""


@lru_cache(maxsize=1024)
def _rule(leaf: Leaf, side: str, is_range_checked: bool) -> tuple[_IsBroken, _Explain] | None:
    """Return the rule of a leaf; None where every value of its dtype is allowed."""
    spec, dtype = leaf.spec, leaf.dtype
    match spec:
        case BoxSpec():
            return _box_rule(leaf.name, spec, side, is_range_checked)
        case DiscreteSpec():
            return _domain_rule(leaf.name, spec.start, spec.start + spec.n - 1)
        case MultiDiscreteSpec():
            highest = np.array(spec.nvec, dtype).reshape(spec.shape) - 1
            return _domain_rule(leaf.name, 0, highest.astype(dtype))
        case MultiBinarySpec():
            return _domain_rule(leaf.name, 0, 1)
        case TextSpec():
            return _text_rule(leaf.name, spec, side) if is_range_checked else None
    assert_never(spec)


def _box_rule(
    path: str, spec: BoxSpec, side: str, is_range_checked: bool
) -> tuple[_IsBroken, _Explain] | None:
    lows, highs = spec.bounds()
    can_be_nan = lows.dtype.kind == "f"
    low = high = None
    if is_range_checked:
        least, greatest = extremes(lows.dtype)
        low, high = _bound(lows, spec.low, least), _bound(highs, spec.high, greatest)
    is_bounded = low is not None or high is not None
    if not (is_bounded or can_be_nan):
        return None

    def explain(column: NDArray[Any]) -> list[ConformanceWarning]:
        if can_be_nan and has_nan(column):
            lane, where = _where(np.isnan(column))
            raise ConformanceError("structure", path, f"is NaN ({where})", lane)
        lane, detail = _first_outside(column, low, high)
        return [ConformanceWarning(side, "range", path, detail, lane)]

    # NaN is outside every interval: one comparison finds it, too.
    return (_outside(low, high) if is_bounded else has_nan), explain


def _domain_rule(path: str, low: int, high: Any) -> tuple[_IsBroken, _Explain]:
    def explain(column: NDArray[Any]) -> NoReturn:
        lane, message = _first_outside(column, low, high)
        raise ConformanceError("structure", path, message, lane)

    return _outside(low, high), explain


def _outside(low: Any, high: Any) -> _IsBroken:
    """Return the test whether a column leaves an interval.

    A bound is a number or one for each element; None: every value of the dtype is within.
    """

    def is_outside(column: NDArray[Any]) -> bool:
        # On small arrays count_nonzero takes a third of the time of all(), which is Python code.
        return not (
            (low is None or np.count_nonzero(column >= low) == column.size)
            and (high is None or np.count_nonzero(column <= high) == column.size)
        )

    def is_outside_numbers(column: NDArray[Any]) -> bool:
        if column.size == 1:
            value = column.item()
            return not ((low is None or value >= least) and (high is None or value <= most))
        # The array's min() and max() are Python code, which takes long for few rows.
        return bool(column.size) and not (
            (low is None or np.minimum.reduce(column, axis=None) >= low)
            and (high is None or np.maximum.reduce(column, axis=None) <= high)
        )

    if np.ndim(low) or np.ndim(high):
        return is_outside
    # As Python compares them: NumPy 1 makes floats of an unsigned and a signed integer.
    least, most = (each.item() if isinstance(each, np.generic) else each for each in (low, high))
    return is_outside_numbers


def _first_outside(column: NDArray[Any], low: Any, high: Any) -> tuple[int, str]:
    """Return lane and description of the first element outside the bounds; none is NaN."""
    bound, word, is_outside = low, "below", np.zeros(column.shape, np.bool_)
    if low is not None:
        is_outside = column < low
    if not is_outside.any():
        bound, word, is_outside = high, "above", column > high
    index = np.unravel_index(int(is_outside.argmax()), column.shape)
    limit = np.broadcast_to(bound, column.shape)[index]
    lane, where = _where(is_outside)
    return lane, f"{column[index]} is {word} {limit} ({where})"


def _text_rule(path: str, spec: TextSpec, side: str) -> tuple[_IsBroken, _Explain]:
    allowed = frozenset(spec.charset)  # empty: every character

    def is_broken(column: Sequence[str]) -> bool:
        return not all(
            spec.min_length <= len(text) <= spec.max_length
            and (not allowed or allowed.issuperset(text))
            for text in column
        )

    def explain(column: Sequence[str]) -> list[ConformanceWarning]:
        found: dict[str, ConformanceWarning] = {}

        def add(kind: str, detail: str, lane: int) -> None:
            found.setdefault(
                kind, ConformanceWarning(side, kind, path, f"{detail} (lane {lane})", lane)
            )

        for lane, text in enumerate(column):
            if not spec.min_length <= len(text) <= spec.max_length:
                expected = f"{spec.min_length} to {spec.max_length}"
                add("length", f"has {len(text)} characters, expected {expected}", lane)
            other = next((char for char in text if allowed and char not in allowed), None)
            if other is not None:
                add("charset", f"{other!r} is not in the charset", lane)
        return list(found.values())

    return is_broken, explain


def _bound(bounds: NDArray[Any], raw: bytes, extreme: Any) -> Any:
    """Return the cheapest form of ``bounds`` (``raw`` in the spec): None, a scalar, the array."""
    if (np.frombuffer(raw, bounds.dtype) == extreme).all():
        return None
    return bounds.flat[0] if len(raw) == bounds.itemsize else bounds


def has_nan(column: NDArray[Any]) -> bool:
    if column.size <= _FEW:
        square = np.vdot(column, column)  # a sum of squares is NaN only if an element is
        return bool(square != square)
    least = np.minimum.reduce(column, axis=None)  # NaN, if there is one
    return bool(least != least)


def _where(is_offending: NDArray[Any]) -> tuple[int, str]:
    """Return lane and description of the first True; the first axis is the lane."""
    index = np.unravel_index(int(is_offending.argmax()), is_offending.shape)
    lane, element = int(index[0]), tuple(map(int, index[1:]))
    return lane, f"lane {lane}, element {element}" if element else f"lane {lane}"


WARNING_KEY = "rlmesh.conformance.warning"
"""Reserved key of the infos."""


class WarningCounter:
    """Counts the warnings of a session, and selects the first of each side, kind and path."""

    def __init__(self) -> None:
        self._reported: set[tuple[str, str, str]] = set()
        self.num_found = 0
        """Number of all warnings, reported or not."""

    @property
    def num_reported(self) -> int:
        return len(self._reported)

    def unreported(self, found: Sequence[ConformanceWarning]) -> list[ConformanceWarning]:
        """Count the warnings in ``found``; return the first of each new side, kind and path."""
        self.num_found += len(found)
        fresh = []
        for warning in found:
            key = (warning.side, warning.kind, warning.path)
            if key not in self._reported:
                self._reported.add(key)
                fresh.append(warning)
        return fresh


def warnings_info(found: Sequence[ConformanceWarning], num_lanes: int) -> dict[str, object]:
    """Return warnings as infos of a vector: under ``WARNING_KEY`` a list for a lane with some."""
    by_lane: dict[int, list[ConformanceWarning]] = {}
    for warning in found:
        by_lane.setdefault(warning.lane, []).append(warning)
    return lane_entries(WARNING_KEY, by_lane, num_lanes)


def warnings_as_texts(infos: Mapping[str, object]) -> Mapping[str, object]:
    """Return the infos of a vector with each warning as text; the same object if there are none."""
    entries = infos.get(WARNING_KEY)
    if not isinstance(entries, np.ndarray) or not _warnings_in(entries):
        return infos
    texts = {
        lane: [warning.text for warning in own]
        for lane, own in enumerate(entries)
        if own is not None
    }
    return {**infos, **lane_entries(WARNING_KEY, texts, len(entries))}


def warnings_as_maps(infos: Mapping[str, object]) -> Mapping[str, object]:
    """Return infos, also of one lane, with all warnings as a list of maps, as rlmesh 0.1.0 has."""
    maps = [warning.entries for warning in _warnings_in(infos.get(WARNING_KEY))]
    rest = {key: value for key, value in infos.items() if key != f"_{WARNING_KEY}"}
    return {**rest, WARNING_KEY: maps} if maps else infos


def _warnings_in(entries: Any) -> list[ConformanceWarning]:
    """Return the warnings of all lanes, or of one; none where an environment has used the key."""
    own = [entries] if isinstance(entries, list) else entries
    if not isinstance(own, (list, np.ndarray)):
        return []
    lists = [one for one in own if one is not None]
    if not all(isinstance(one, list) for one in lists):
        return []
    found = [warning for one in lists for warning in one]
    return found if all(isinstance(warning, ConformanceWarning) for warning in found) else []
