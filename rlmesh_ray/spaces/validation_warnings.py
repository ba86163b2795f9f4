"""Conformance warnings: entries of the infos about values that are delivered out of their range.

Inside an endpoint they are ``ConformanceWarning`` values under ``WARNING_KEY``; each dialect has
its own form of them for clients (edition 2026.06, "Conformance warnings").
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlmesh_ray.spaces.validation import Violation

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

    @classmethod
    def of(cls, side: str, violation: Violation) -> "ConformanceWarning":
        """Return the warning about ``violation``."""
        return cls(side, violation.kind, violation.path, violation.message)

    @property
    def text(self) -> str:
        """The warning as one line of text."""
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
        """Number of warnings that ``unreported`` has returned."""
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


def warnings_as_texts(infos: Mapping[str, object]) -> Mapping[str, object]:
    """Return ``infos`` with each warning as text; the same object if there are none."""
    return _converted(infos, lambda warning: warning.text)


def warnings_as_maps(infos: Mapping[str, object]) -> Mapping[str, object]:
    """Return ``infos`` with each warning as a map, as rlmesh 0.1.0 does.

    The same object if there are none.
    """
    return _converted(infos, lambda warning: warning.entries)


def _converted(
    infos: Mapping[str, object], convert: Callable[[ConformanceWarning], object]
) -> Mapping[str, object]:
    found = infos.get(WARNING_KEY)
    # An environment may have put something else under this key.
    if not isinstance(found, list) or not all(isinstance(w, ConformanceWarning) for w in found):
        return infos
    return {**infos, WARNING_KEY: [convert(warning) for warning in found]}
