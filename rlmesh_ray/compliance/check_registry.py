"""CheckRegistry: the checks of a service by clause."""

from collections.abc import Callable
from typing import Generic, TypeVar

from rlmesh_ray.compliance.clauses import CLAUSES

SubjectT = TypeVar("SubjectT")
Check = Callable[[SubjectT], None]


class CheckRegistry(Generic[SubjectT]):
    """The checks of one service, filled by the modules that define them."""

    def __init__(self) -> None:
        self.checks: dict[str, Check[SubjectT]] = {}
        """The checks by clause key."""

    def holds(self, clause: str) -> Callable[[Check[SubjectT]], Check[SubjectT]]:
        """Mark a function as the check of ``clause``."""
        assert clause in CLAUSES, clause

        def keep(check: Check[SubjectT]) -> Check[SubjectT]:
            assert clause not in self.checks, clause
            self.checks[clause] = check
            return check

        return keep
