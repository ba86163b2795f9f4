"""When to retry, and when to give up, after failures of an endpoint or of its environment."""

from rlmesh_ray.errors import (
    AccessDeniedError,
    ConfigurationError,
    ConformanceError,
    EndpointError,
    HandshakeRefusedError,
    RlmeshError,
)

# An endpoint that Ray restarts answers again after 2 s; Ray notices a node that is lost silently
# after a minute, and restarts its actors elsewhere.
_GIVE_UP_AFTER_S = 120.0
_FIRST_DELAY_S = 0.25
_LONGEST_DELAY_S = 1.0
_MAX_ENV_FAILURES = 10
_ENV_DELAY_S = 0.1
_NOT_RETRIED = (
    AccessDeniedError,
    ConfigurationError,
    ConformanceError,
    HandshakeRefusedError,
)
"""Errors after which another attempt would fail in the same way."""


class RetryPolicy:
    """Decides when to try again, and when to give up.

    An endpoint that is away is tried again for some time, at growing intervals; the first attempt
    is made at once. An environment that raises is tried again ten times until it finishes an
    episode: an attempt makes a new environment, which may work, or it may be broken for good. An
    error ends the episodes of all lanes; episodes that end lane by lane count just as much.

    Args:
        give_up_after_s: How long an endpoint may stay away.
        num_lanes: Lanes that share the environment's failures.
    """

    def __init__(self, give_up_after_s: float = _GIVE_UP_AFTER_S, num_lanes: int = 1) -> None:
        self._give_up_after_s = give_up_after_s
        self._num_lanes = num_lanes
        self.num_failures = 0
        """Failures since the last success."""
        self.num_raised = 0
        """Errors of the environment since it finished an episode."""
        self.num_discarded = 0
        """Episodes since then that ended before a step which was discarded."""
        self._since_s: float | None = None
        self._next_report_s = 0.0
        """How long an endpoint has been away when its absence is reported next."""

    def succeeded(self) -> None:
        self.num_failures = 0
        self._since_s = None
        self._next_report_s = 0.0

    def finished_episode(self) -> None:
        self.num_raised = 0
        self.num_discarded = 0

    @property
    def num_env_failures(self) -> int:
        """Failures of the environment since it finished an episode, each in all lanes."""
        return self.num_raised + self.num_discarded // self._num_lanes

    def failed(
        self, error: RlmeshError, now_s: float, *, others_work: bool = False
    ) -> float | None:
        """Return after how many seconds to try again; None: give up.

        Args:
            error: The failure.
            now_s: The time by any monotonic clock.
            others_work: Whether other slots sample: the endpoint may stay away without limit then.
        """
        self.num_failures += 1
        if self._since_s is None:
            self._since_s = now_s
        if isinstance(error, _NOT_RETRIED):
            return None
        if not isinstance(error, EndpointError):
            self.num_raised += 1
            if self._is_exhausted:
                return None
            return _delay_s(_ENV_DELAY_S, self.num_raised)
        if now_s - self._since_s > self._give_up_after_s and not others_work:
            return None
        return _delay_s(_FIRST_DELAY_S, self.num_failures)

    def absence_to_report(self, now_s: float) -> tuple[float, float] | None:
        """Return for how long an endpoint has been away, and after how many seconds it is given up.

        None: this failure is not reported. The first one is, and others after 1, 2, 4, 8, ...
        seconds, so that a long absence does not fill the log.
        """
        away_s = 0.0 if self._since_s is None else now_s - self._since_s
        if away_s < self._next_report_s:
            return None
        while self._next_report_s <= away_s:
            self._next_report_s = max(2.0 * self._next_report_s, 1.0)
        return away_s, max(self._give_up_after_s - away_s, 0.0)

    def discarded(self, num_episodes: int) -> bool:
        """Note episodes that ended before a discarded step; return whether to give up."""
        self.num_discarded += num_episodes
        return self._is_exhausted

    @property
    def _is_exhausted(self) -> bool:
        num_lost = self.num_raised * self._num_lanes + self.num_discarded
        return num_lost > _MAX_ENV_FAILURES * self._num_lanes


def _delay_s(first_s: float, num_tries: int) -> float:
    if num_tries <= 1:
        return 0.0
    return min(first_s * 2.0 ** (num_tries - 2), _LONGEST_DELAY_S)
