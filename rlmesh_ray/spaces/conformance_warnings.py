"""Conformance warnings: what the infos say of values that are delivered out of their range.

Inside an endpoint they are ``ConformanceWarning`` values under ``WARNING_KEY``; how clients see
them is their dialect's affair (edition 2026.06, "Conformance warnings").
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlmesh_ray.spaces.conformance import Violation

WARNING_KEY = "rlmesh.conformance.warning"
"""Reserved key of the infos."""


@dataclass(frozen=True, slots=True)
class ConformanceWarning:
    """A value out of its range, which was delivered, or which has truncated its episode."""

    side: str
    """Whose it is: ``"action"``, ``"observation"`` or ``"reward"``."""
    kind: str
    """See ``Violation``; or ``"truncated"``: the value was not delivered (``on_bad_value``)."""
    path: str
    """See ``Violation``."""
    detail: str
    """See ``Violation.message``."""

    @classmethod
    def of(cls, side: str, deviation: Violation) -> "ConformanceWarning":
        """Return the warning that tells of ``deviation``."""
        return cls(side, deviation.kind, deviation.path, deviation.message)

    @property
    def text(self) -> str:
        """One line, for people."""
        place = f"{self.side}.{self.path}" if self.path else self.side
        return f"{place}: {self.detail}"

    @property
    def entries(self) -> dict[str, str]:
        """Entries that name the side and the place, the root being ``$``."""
        path = f"$.{self.path}" if self.path else "$"
        return {"path": path, "kind": self.side, "detail": f"{path}: {self.detail}"}


class WarningCounter:
    """Counts values that are not as they should be, and tells each kind and path once."""

    def __init__(self) -> None:
        self._reported: set[tuple[str, str, str]] = set()
        self.num_found = 0
        """How many up to now, also those that the session has been told of."""

    @property
    def num_reported(self) -> int:
        """How many the session has been told of."""
        return len(self._reported)

    def unreported(self, found: Sequence[ConformanceWarning]) -> list[ConformanceWarning]:
        """Count what was ``found``; return what the session has not been told yet."""
        self.num_found += len(found)
        fresh = []
        for warning in found:
            what = (warning.side, warning.kind, warning.path)
            if what not in self._reported:
                self._reported.add(what)
                fresh.append(warning)
        return fresh


def warnings_as_texts(infos: Mapping[str, object]) -> Mapping[str, object]:
    """Return ``infos`` with a text for each warning; the same object if there is none."""
    return _with(infos, lambda warning: warning.text)


def warnings_as_maps(infos: Mapping[str, object]) -> Mapping[str, object]:
    """Return ``infos`` with a map for each warning, as rlmesh 0.1.0 gives them.

    The same object if there is none.
    """
    return _with(infos, lambda warning: warning.entries)


def _with(
    infos: Mapping[str, object], shown: Callable[[ConformanceWarning], object]
) -> Mapping[str, object]:
    told = infos.get(WARNING_KEY)
    # Anything else an environment has put there by itself.
    if not isinstance(told, list) or not all(isinstance(one, ConformanceWarning) for one in told):
        return infos
    return {**infos, WARNING_KEY: [shown(warning) for warning in told]}
