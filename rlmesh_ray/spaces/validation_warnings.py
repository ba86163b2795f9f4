"""Conformance warnings: entries of the infos about values that are delivered out of their range.

Inside an endpoint they are ``ConformanceWarning`` values under ``WARNING_KEY``; each dialect has
its own form of them for clients (edition 2026.06, "Conformance warnings").
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlmesh_ray.spaces.validation import Violation
from rlmesh_ray.spaces.vector_infos import lane_entries

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
        """Return the warning about ``violation``."""
        return cls(side, violation.kind, violation.path, violation.message, violation.lane)

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
