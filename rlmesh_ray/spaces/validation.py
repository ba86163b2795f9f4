"""Conformance checks: whether values lie in their space (edition: "Value Conformance").

Structural violations are always rejected; the validation mode decides about range violations.

Inside an endpoint, warnings about values that are delivered out of their range are entries of
the infos: ``ConformanceWarning`` values under ``WARNING_KEY``. Each dialect has its own form of
them for clients (edition 2026.06, "Conformance warnings").
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Self, assert_never

import numpy as np
from numpy.typing import NDArray
from rlmesh_ray.errors import ConfigurationError, ConformanceError
from rlmesh_ray.spaces.spec import (
    BoxSpec,
    Column,
    DiscreteSpec,
    Leaf,
    MultiBinarySpec,
    MultiDiscreteSpec,
    SpaceSpec,
    TextSpec,
    leaves,
)
from rlmesh_ray.spaces.vector_infos import lane_entries

from rlmesh_ray.spaces.batch import coerce, flatten

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
class Violation:
    """A range violation: a value that is delivered although it is out of its range."""

    kind: str
    """``"range"`` for a Box, ``"length"`` or ``"charset"`` for a Text."""
    path: str
    """Dotted path of the leaf, such as ``"camera.depth"``; empty at the root."""
    message: str
    """What was found and what was expected, as part of a sentence."""
    lane: int = field(default=0, compare=False)
    """Lane of the first such value; ``message`` names it, too."""


def coerce_batch(spec: SpaceSpec, value: Any, num_lanes: int) -> list[Column]:
    """Return the columns of a batched value, at the exact dtypes of the space.

    Args:
        spec: Space of one lane.
        value: Batch in the form of gymnasium's vector environments: every leaf
            ``(num_lanes, *shape)``, for Text a sequence of ``num_lanes`` strings.
        num_lanes: Width of the batch.

    Raises:
        ConformanceError: Wrong structure or shape, or a number that its dtype cannot hold.
    """
    parts = zip(leaves(spec), flatten(spec, value), strict=True)
    return [coerce(leaf, part, num_lanes) for leaf, part in parts]


class Checker:
    """Checks batches of one space: structural rules always, range rules as ``validation`` says.

    Args:
        leaves_: Leaves of the space.
        validation: Treatment of range violations.
    """

    def __init__(self, leaves_: Sequence[Leaf], validation: ValidationMode) -> None:
        self._rules = [_rule(leaf) for leaf in leaves_]
        self._is_strict = validation is ValidationMode.STRICT
        self._is_range_checked = validation is not ValidationMode.OFF

    def check(self, columns: Sequence[Column]) -> list[Violation]:
        """Check a batch.

        Args:
            columns: One coerced column for each leaf.

        Returns:
            The range violations, at most one for each kind and leaf; empty unless the mode is WARN.

        Raises:
            ConformanceError: NaN, or an element outside the domain of its Discrete,
                MultiDiscrete or MultiBinary (``"structure"``); with STRICT also a value out of
                its range (``"range"``).
        """
        violations: list[Violation] = []
        for rule, column in zip(self._rules, columns, strict=True):
            violations += rule.violations(column, is_range_checked=self._is_range_checked)
        if violations and self._is_strict:
            raise _rejected(violations[0])
        return violations


def check_rewards(rewards: NDArray[np.float64], validation: ValidationMode) -> list[Violation]:
    """Check that rewards are finite, which no space demands and every learner needs.

    Args:
        rewards: ``(num_lanes,) float64``.
        validation: Treatment of a reward that is not finite.

    Returns:
        The first violation in a list; empty unless the mode is WARN.

    Raises:
        ConformanceError: One is not finite, and the mode is STRICT (``"range"``).
    """
    is_finite = np.isfinite(rewards)
    if validation is ValidationMode.OFF or np.count_nonzero(is_finite) == is_finite.size:
        return []
    lane = int(is_finite.argmin())
    found = Violation("range", "", f"{rewards[lane]} is not finite (lane {lane})", lane)
    if validation is ValidationMode.STRICT:
        raise _rejected(found)
    return [found]


def _rejected(found: Violation) -> ConformanceError:
    return ConformanceError("range", found.path, found.message, found.lane)


@lru_cache(maxsize=256)
def structure_checker(spec: SpaceSpec) -> Checker:
    return Checker(leaves(spec), ValidationMode.OFF)


@dataclass(frozen=True, slots=True)
class _IntervalRule:
    """Bounds of an array leaf; None on a side where every value of the dtype is allowed."""

    path: str
    low: Any
    high: Any
    is_domain: bool
    """Whether a value outside is a structural violation (as for Discrete) or a range violation."""
    can_be_nan: bool
    is_uniform: bool
    """Whether the bounds are numbers that hold for every element; arrays otherwise."""

    def violations(self, column: Any, *, is_range_checked: bool) -> list[Violation]:
        is_bounded = self.low is not None or self.high is not None
        is_checked = is_bounded and (is_range_checked or self.is_domain)
        # NaN is outside every interval: one comparison finds it, too.
        if is_checked and self._holds(column):
            return []
        if self.can_be_nan and has_nan(column):
            lane, where = _where(np.isnan(column))
            raise ConformanceError("structure", self.path, f"is NaN ({where})", lane)
        if not is_checked:
            return []
        lane, message = self._message(column)
        if self.is_domain:
            raise ConformanceError("structure", self.path, message, lane)
        return [Violation("range", self.path, message, lane)]

    def _holds(self, column: NDArray[Any]) -> bool:
        if self.is_domain and self.is_uniform and column.size == 1:
            return bool(self.low <= column.item() <= self.high)
        if self.is_uniform and column.size:
            return (self.low is None or bool(_least(column) >= self.low)) and (
                self.high is None or bool(np.maximum.reduce(column, axis=None) <= self.high)
            )
        # On small arrays count_nonzero takes a third of the time of all(), which is Python code.
        return (self.low is None or np.count_nonzero(column >= self.low) == column.size) and (
            self.high is None or np.count_nonzero(column <= self.high) == column.size
        )

    def _message(self, column: NDArray[Any]) -> tuple[int, str]:
        """Return lane and description of the first element outside the bounds; none is NaN."""
        bound, word, is_outside = self.low, "below", np.zeros(column.shape, np.bool_)
        if self.low is not None:
            is_outside = column < self.low
        if not is_outside.any():
            bound, word, is_outside = self.high, "above", column > self.high
        index = np.unravel_index(int(is_outside.argmax()), column.shape)
        limit = np.broadcast_to(bound, column.shape)[index]
        lane, where = _where(is_outside)
        return lane, f"{column[index]} is {word} {limit} ({where})"


@dataclass(frozen=True, slots=True)
class _TextRule:
    """Length and alphabet of a Text leaf."""

    path: str
    min_length: int
    max_length: int
    charset: frozenset[str]
    """Empty: every character is allowed."""

    def violations(self, column: Any, *, is_range_checked: bool) -> list[Violation]:
        if not is_range_checked:
            return []
        by_kind: dict[str, Violation] = {}
        for lane, text in enumerate(column):
            for kind, message in self._of_one(text):
                found = Violation(kind, self.path, f"{message} (lane {lane})", lane)
                by_kind.setdefault(kind, found)
        return list(by_kind.values())

    def _of_one(self, text: str) -> list[tuple[str, str]]:
        found = []
        if not self.min_length <= len(text) <= self.max_length:
            expected = f"{self.min_length} to {self.max_length}"
            found.append(("length", f"has {len(text)} characters, expected {expected}"))
        if self.charset and not self.charset.issuperset(text):
            other = next(char for char in text if char not in self.charset)
            found.append(("charset", f"{other!r} is not in the charset"))
        return found


@lru_cache(maxsize=1024)
def _rule(leaf: Leaf) -> _IntervalRule | _TextRule:
    spec, dtype = leaf.spec, leaf.dtype
    match spec:
        case BoxSpec():
            lows, highs = spec.bounds()
            least, greatest = extremes(lows.dtype)
            low = _bound(lows, spec.low, least)
            high = _bound(highs, spec.high, greatest)
            can_be_nan = lows.dtype.kind == "f"
            return _interval(leaf, low, high, is_domain=False, can_be_nan=can_be_nan)
        case DiscreteSpec():
            return _interval(leaf, spec.start, spec.start + spec.n - 1)
        case MultiDiscreteSpec():
            highest = np.array(spec.nvec, dtype).reshape(spec.shape) - 1
            return _interval(leaf, 0, highest.astype(dtype))
        case MultiBinarySpec():
            return _interval(leaf, 0, 1)
        case TextSpec():
            charset = frozenset(spec.charset)
            return _TextRule(leaf.name, spec.min_length, spec.max_length, charset)
    assert_never(spec)


def _interval(
    leaf: Leaf, low: Any, high: Any, *, is_domain: bool = True, can_be_nan: bool = False
) -> _IntervalRule:
    is_uniform = np.ndim(low) == np.ndim(high) == 0
    return _IntervalRule(leaf.name, low, high, is_domain, can_be_nan, is_uniform)


def extremes(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    if dtype.kind == "f":
        return -np.inf, np.inf
    if dtype.kind == "b":
        return False, True
    return np.iinfo(dtype).min, np.iinfo(dtype).max


def _bound(bounds: NDArray[Any], raw: bytes, extreme: Any) -> Any:
    """Return the cheapest form of ``bounds`` (``raw`` in the spec): None, a scalar, the array."""
    if (np.frombuffer(raw, bounds.dtype) == extreme).all():
        return None
    return bounds.flat[0] if len(raw) == bounds.itemsize else bounds


# The array's min() and max() are Python code, which takes long for batches of few rows.
def _least(column: NDArray[Any]) -> Any:
    return np.minimum.reduce(column, axis=None)


def has_nan(column: NDArray[Any]) -> bool:
    if column.size <= _FEW:
        square = np.vdot(column, column)  # a sum of squares is NaN only if an element is
        return bool(square != square)
    least = _least(column)  # NaN, if there is one
    return bool(least != least)


def _where(is_offending: NDArray[Any]) -> tuple[int, str]:
    """Return lane and description of the first True; the first axis is the lane."""
    index = np.unravel_index(int(is_offending.argmax()), is_offending.shape)
    lane, element = int(index[0]), tuple(map(int, index[1:]))
    return lane, f"lane {lane}, element {element}" if element else f"lane {lane}"


WARNING_KEY = "rlmesh.conformance.warning"
"""Reserved key of the infos."""


@dataclass(frozen=True, slots=True)
class ConformanceWarning:
    """A value out of its range, which was delivered, or which has truncated its episode."""

    side: str
    """Kind of value: ``"action"``, ``"observation"`` or ``"reward"``."""
    kind: str
    """See ``Violation``; or ``"truncated"``: the value was not delivered (``on_bad_value``)."""
    path: str
    """See ``Violation``."""
    detail: str
    """See ``Violation.message``."""
    lane: int = field(default=0, compare=False)
    """See ``Violation.lane``."""

    @classmethod
    def of(cls, side: str, violation: Violation) -> "ConformanceWarning":
        return cls(side, violation.kind, violation.path, violation.message, violation.lane)

    @property
    def text(self) -> str:
        place = f"{self.side}.{self.path}" if self.path else self.side
        return f"{place}: {self.detail}"

    @property
    def entries(self) -> dict[str, str]:
        """The warning as a map with a JSON-like path, whose root is ``$``."""
        path = f"$.{self.path}" if self.path else "$"
        return {"path": path, "kind": self.side, "detail": f"{path}: {self.detail}"}


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
    """Return warnings as infos of a vector: under ``WARNING_KEY`` a list for each lane with some.

    Args:
        found: At least one.
        num_lanes: Width of the vector.
    """
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
    """Return ``infos`` with all warnings as one list of maps, as rlmesh 0.1.0 does.

    Args:
        infos: Of a vector, or of one of its lanes; returned itself if it has no warnings.
    """
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
