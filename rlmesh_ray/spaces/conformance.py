"""Whether values lie in their space, after the edition's "Value Conformance".

Structural deviations are rejected whatever the policy; range deviations follow it.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, Self, assert_never

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import ConfigurationError, ConformanceError
from rlmesh_ray.spaces.batch import flatten
from rlmesh_ray.spaces.coercion import coerce
from rlmesh_ray.spaces.leaves import Column, Leaf, leaves
from rlmesh_ray.spaces.spec import (
    BoxSpec,
    DiscreteSpec,
    MultiBinarySpec,
    MultiDiscreteSpec,
    SpaceSpec,
    TextSpec,
)

__all__ = [
    "Checker",
    "ValidationMode",
    "Violation",
    "check",
    "check_rewards",
    "coerce",
    "coerce_batch",
    "has_nan",
    "structure_checker",
]


_FEW = 1024
"""Numbers that are multiplied in half the time in which the smallest of them is found."""


class ValidationMode(enum.Enum):
    """What a server does with a value that is out of its range."""

    WARN = "warn"
    """Deliver it and report it."""
    STRICT = "strict"
    """Reject it."""
    OFF = "off"
    """Do not look."""

    @classmethod
    def from_option(cls, validation: str) -> Self:
        """Return the policy that an option names.

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
    """A value that is delivered although it is out of its range."""

    kind: str
    """``"range"`` for a Box, ``"length"`` or ``"charset"`` for a Text."""
    path: str
    """Such as ``"camera.depth"``; empty at the root."""
    message: str
    """What was found and what was expected, as part of a sentence."""
    lane: int = field(default=0, compare=False)
    """Of the first value for which that is true; ``message`` names it, too."""


def coerce_batch(spec: SpaceSpec, value: Any, num_lanes: int) -> list[Column]:
    """Return the columns of a batched value, at the exact dtypes of the space.

    Args:
        spec: Of one lane.
        value: As gymnasium's vector environments have it: every leaf ``(num_lanes, *shape)``,
            a sequence of ``num_lanes`` strings for Text.
        num_lanes: Width of the batch.

    Raises:
        ConformanceError: Wrong structure or shape, or a number that its dtype cannot hold.
    """
    parts = zip(leaves(spec), flatten(spec, value), strict=True)
    return [coerce(leaf, part, num_lanes) for leaf, part in parts]


class Checker:
    """Checks batches of one space: structural rules always, range rules as ``validation`` says.

    Args:
        leaves_: Of the space.
        validation: What to do about values out of their range.
    """

    def __init__(self, leaves_: Sequence[Leaf], validation: ValidationMode) -> None:
        self._rules = [_rule(leaf) for leaf in leaves_]
        self._is_strict = validation is ValidationMode.STRICT
        self._is_range_checked = validation is not ValidationMode.OFF

    def check(self, columns: Sequence[Column]) -> list[Violation]:
        """See the function of that name."""
        deviations: list[Violation] = []
        for rule, column in zip(self._rules, columns, strict=True):
            deviations += rule.deviations(column, is_range_checked=self._is_range_checked)
        if deviations and self._is_strict:
            raise _refused(deviations[0])
        return deviations


def check(
    leaves_: Sequence[Leaf], columns: Sequence[Column], validation: ValidationMode
) -> list[Violation]:
    """Check a batch: structural rules always, range rules as ``validation`` says.

    Args:
        leaves_: Of the space.
        columns: One a leaf, coerced.
        validation: What to do about values out of their range.

    Returns:
        The range deviations, at most one a kind and leaf; empty unless the policy is WARN.

    Raises:
        ConformanceError: NaN, or an element outside the domain of its Discrete,
            MultiDiscrete or MultiBinary (``"structure"``); with STRICT also a value out of
            its range (``"range"``).
    """
    return Checker(leaves_, validation).check(columns)


def check_rewards(rewards: NDArray[np.float64], validation: ValidationMode) -> list[Violation]:
    """Check that rewards are finite. No space says so, and a learner can do nothing with others.

    Args:
        rewards: ``(num_lanes,) float64``.
        validation: What to do about one that is not.

    Returns:
        The deviation, if there is one; empty unless the policy is WARN.

    Raises:
        ConformanceError: One is not finite, and the policy is STRICT (``"range"``).
    """
    is_finite = np.isfinite(rewards)
    if validation is ValidationMode.OFF or np.count_nonzero(is_finite) == is_finite.size:
        return []
    lane = int(is_finite.argmin())
    found = Violation("range", "", f"{rewards[lane]} is not finite (lane {lane})", lane)
    if validation is ValidationMode.STRICT:
        raise _refused(found)
    return [found]


def _refused(found: Violation) -> ConformanceError:
    return ConformanceError("range", found.path, found.message, found.lane)


@lru_cache(maxsize=256)
def structure_checker(spec: SpaceSpec) -> Checker:
    """Return what checks the structural rules of a space alone; the same one each time."""
    return Checker(leaves(spec), ValidationMode.OFF)


class _Rule(Protocol):
    def deviations(self, column: Any, *, is_range_checked: bool) -> list[Violation]: ...


@dataclass(frozen=True, slots=True)
class _IntervalRule:
    """Bounds of an array leaf; None on a side where every value of the dtype is allowed."""

    path: str
    low: Any
    high: Any
    is_domain: bool
    """Whether to leave the bounds is structural (Discrete and its kin) or a range matter."""
    can_be_nan: bool
    is_uniform: bool
    """Whether the bounds are numbers, the same for every element; arrays otherwise."""

    def deviations(self, column: NDArray[Any], *, is_range_checked: bool) -> list[Violation]:
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
                self.high is None or bool(_greatest(column) <= self.high)
            )
        # Counting costs a third of what all() does on small arrays, which goes through Python.
        return (self.low is None or np.count_nonzero(column >= self.low) == column.size) and (
            self.high is None or np.count_nonzero(column <= self.high) == column.size
        )

    def _message(self, column: NDArray[Any]) -> tuple[int, str]:
        """Return lane and description of the first element outside; none is NaN."""
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

    def deviations(self, column: tuple[str, ...], *, is_range_checked: bool) -> list[Violation]:
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
            stranger = next(char for char in text if char not in self.charset)
            found.append(("charset", f"{stranger!r} is not in the charset"))
        return found


@lru_cache(maxsize=1024)
def _rule(leaf: Leaf) -> _Rule:
    spec, dtype = leaf.spec, leaf.dtype
    match spec:
        case BoxSpec():
            lows, highs = spec.bounds()
            least, greatest = _extremes(lows.dtype)
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


def _extremes(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    if dtype.kind == "f":
        return -np.inf, np.inf
    if dtype.kind == "b":
        return False, True
    return np.iinfo(dtype).min, np.iinfo(dtype).max


def _bound(bounds: NDArray[Any], kept: bytes, extreme: Any) -> Any:
    """Return the cheapest form of ``bounds``, which ``kept`` holds: None, a scalar, the array."""
    if (np.frombuffer(kept, bounds.dtype) == extreme).all():
        return None
    return bounds.flat[0] if len(kept) == bounds.itemsize else bounds


# The array's own methods go through Python; a batch of few rows would notice that.
def _least(column: NDArray[Any]) -> Any:
    return np.minimum.reduce(column, axis=None)


def _greatest(column: NDArray[Any]) -> Any:
    return np.maximum.reduce(column, axis=None)


def has_nan(column: NDArray[Any]) -> bool:
    """Tell whether there is any NaN in an array of a float dtype."""
    if column.size <= _FEW:
        square = np.vdot(column, column)  # of what is not below zero: NaN, if there is one
        return bool(square != square)
    least = _least(column)  # NaN, if there is one
    return bool(least != least)


def _where(is_offending: NDArray[Any]) -> tuple[int, str]:
    """Return the lane of the first offender, and its place in words; the first axis is the lane."""
    index = np.unravel_index(int(is_offending.argmax()), is_offending.shape)
    lane, element = int(index[0]), tuple(map(int, index[1:]))
    return lane, f"lane {lane}, element {element}" if element else f"lane {lane}"
