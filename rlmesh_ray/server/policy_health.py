"""Health of a policy: working, stuck at one batch or call, or stuck a moment ago."""

import time

from rlmesh_ray.options import require_seconds
from rlmesh_ray.server.health import WATCH_PERIOD_S, Health

# Long enough for every Watch to see it.
_BLOCKED_REPORT_S = 2 * WATCH_PERIOD_S


class PolicyHealth:
    """Decides whether a policy makes progress.

    Args:
        stuck_after_s: Seconds at one batch, or one call, after which the policy counts as stuck.

    Raises:
        ConfigurationError: ``stuck_after_s`` is no positive number of seconds.
    """

    def __init__(self, stuck_after_s: float) -> None:
        require_seconds("stuck_after_s", stuck_after_s, allow_infinite=True)
        self._stuck_after_s = stuck_after_s
        self._blocked_for_s = 0.0
        self._blocked_report_until_s = 0.0

    def note_inline_run(self, took_s: float) -> None:
        """Note how long the policy has kept the serving loop.

        gRPC could not report a stuck policy meanwhile, so it is reported for a moment afterwards.
        """
        if took_s > self._stuck_after_s:
            self._blocked_for_s = took_s
            self._blocked_report_until_s = time.monotonic() + _BLOCKED_REPORT_S

    def of(self, busy_for_s: float) -> Health:
        """Return the health of a policy that has been busy so long. From any thread."""
        if busy_for_s > self._stuck_after_s:
            return Health(False, f"the policy has not come back for {busy_for_s:.0f} s")
        if time.monotonic() < self._blocked_report_until_s:
            return Health(
                False, f"the policy has just held all sessions for {self._blocked_for_s:.0f} s"
            )
        return Health(is_serving=True)
