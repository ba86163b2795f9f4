"""Which endpoints each session of each runner samples from, unless the registry moves it."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionLayout:
    """The endpoints of one group of runners, and the distribution of its sessions over them.

    The sessions of all runners, counted runner by runner, are assigned to the endpoints in order;
    the numbers of sessions of two endpoints differ by one at most. So a runner has as few endpoints
    as possible, and no two runners share one as long as there are enough.
    """

    num_endpoints: int
    num_runners: int
    sessions_per_runner: int
    first_endpoint: int = 0

    @property
    def num_sessions(self) -> int:
        """Sessions of all runners together."""
        return self.num_runners * self.sessions_per_runner

    def endpoints_of(self, worker_index: int) -> tuple[int, ...]:
        """Return the endpoints of a runner: one entry for each session.

        Args:
            worker_index: RLlib's index: remote runners from 1, the local one is 0. Runners beyond
                the planned ones begin again at the first.
        """
        first = max(worker_index - 1, 0) % self.num_runners * self.sessions_per_runner
        return tuple(
            self.first_endpoint + (first + session) * self.num_endpoints // self.num_sessions
            for session in range(self.sessions_per_runner)
        )


def max_sessions_per_endpoint(training: SessionLayout, evaluation: SessionLayout | None) -> int:
    """Return how many sessions the busiest endpoint has when all sessions are open."""
    counts = [math.ceil(s.num_sessions / s.num_endpoints) for s in (training, evaluation) if s]
    has_own = evaluation is not None and evaluation.first_endpoint > 0
    return max(counts) if has_own else sum(counts)
