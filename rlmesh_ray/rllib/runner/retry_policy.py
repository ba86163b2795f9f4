"""How long to keep trying when an endpoint, or the environment behind it, fails again and again."""

from rlmesh_ray.errors import (
    AccessDeniedError,
    ConfigurationError,
    ConformanceError,
    EndpointError,
    HandshakeRefusedError,
    RlmeshError,
)

# An endpoint that Ray restarts answers again after 2 s; a node that is lost silently is missed
# after a minute, and what was on it comes back elsewhere.
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
"""Another try would end the same."""


class RetryPolicy:
    """Says when to try again, and when not to.

    An endpoint that is away is tried again for some time, at growing intervals; the first try
    comes at once. An environment that raises is tried ten times until it finishes an episode: it
    may be worn out, and another try makes a new one, or it may be broken for good. An error costs
    all lanes their episodes; episodes that are discarded lane by lane count just as much.

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
        """Episodes since then that ended before a step which cannot be used."""
        self._since_s: float | None = None

    def succeeded(self) -> None:
        """Note that it works."""
        self.num_failures = 0
        self._since_s = None

    def finished_episode(self) -> None:
        """Note that the environment has finished an episode."""
        self.num_raised = 0
        self.num_discarded = 0

    @property
    def num_env_failures(self) -> int:
        """Failures of the environment since it finished an episode, of all lanes each."""
        return self.num_raised + self.num_discarded // self._num_lanes

    def failed(
        self, error: RlmeshError, now_s: float, *, others_work: bool = False
    ) -> float | None:
        """Return after how many seconds to try again; None: do not.

        Args:
            error: What went wrong.
            now_s: Any monotonic clock.
            others_work: Whether the work goes on elsewhere: an endpoint may stay away then.
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

    def discarded(self, num_episodes: int) -> bool:
        """Note episodes that ended before an unusable step; return whether to give up."""
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
