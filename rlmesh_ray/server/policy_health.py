"""Whether a policy gets on with its work."""

import time

from rlmesh_ray.options import require_seconds
from rlmesh_ray.server.health import WATCH_PERIOD_S, Health

DEFAULT_STUCK_AFTER_S = 5.0

# Long enough for every Watch to see it.
_TOLD_FOR_S = 2 * WATCH_PERIOD_S


class PolicyHealth:
    """Tells a policy that works from one that is stuck.

    Args:
        stuck_after_s: After how many seconds at one batch, or one call, it counts as stuck.

    Raises:
        ConfigurationError: ``stuck_after_s`` is no number of seconds, more than 0.
    """

    def __init__(self, stuck_after_s: float) -> None:
        require_seconds("stuck_after_s", stuck_after_s, allow_infinite=True)
        self.stuck_after_s = stuck_after_s
        self._held_for_s = 0.0
        self._told_until_s = 0.0

    def note_blocked(self, held_for_s: float) -> None:
        """Note that the policy was stuck in the serving loop, and has come back just now.

        While it held the loop, gRPC could not ask: so that is told for a moment afterwards.
        """
        self._held_for_s = held_for_s
        self._told_until_s = time.monotonic() + _TOLD_FOR_S

    def look(self, busy_for_s: float) -> Health:
        """Tell whether the policy gets on. From any thread.

        Args:
            busy_for_s: For how long it has been at its present work; 0.0 when it has none.
        """
        if busy_for_s > self.stuck_after_s:
            return Health(False, f"the policy has not come back for {busy_for_s:.0f} s")
        if time.monotonic() < self._told_until_s:
            return Health(
                False, f"the policy has just held all sessions for {self._held_for_s:.0f} s"
            )
        return Health(is_serving=True)
