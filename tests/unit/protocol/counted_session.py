"""A session whose lanes are counted in this process, as a worker counts them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from rlmesh_ray.protocol.env_session import EnvOutcome, EnvSession, ResetOutcome, StepOutcome
from rlmesh_ray.protocol.messages import EnvResponse, Reset, Step
from rlmesh_ray.transport.exactly_once import SessionProgress


class CountedSession(EnvSession):
    """See above.

    Args:
        num_lanes: Width of the session's vector.
        new_id: Mints episode ids.
        more: Of EnvSession.
    """

    def __init__(self, num_lanes: int, new_id: Callable[[], str], *more: Any, **named: Any) -> None:
        self._progress = SessionProgress.local(num_lanes)
        self._num_lanes = num_lanes
        super().__init__(num_lanes, new_id, self._progress, *more, **named)

    def complete(self, outcome: EnvOutcome, now_ns: int) -> EnvResponse:
        """Count what the outcome says, as a worker does, and complete the request."""
        request = self.pending
        progress = self._progress
        if isinstance(request, Reset) and isinstance(outcome, ResetOutcome):
            progress.begin(progress.done + 1, 0)
            progress.count_reset(request.env_indices)
            progress.end()
        elif isinstance(request, Step) and isinstance(outcome, StepOutcome):
            progress.begin(progress.done + 1, 0)
            lanes = list(request.env_indices or range(self._num_lanes))
            rewards = np.zeros(self._num_lanes)
            terminated, truncated = np.zeros((2, self._num_lanes), np.bool_)
            rewards[lanes] = outcome.rewards
            terminated[lanes] = list(map(bool, outcome.terminated))
            truncated[lanes] = list(map(bool, outcome.truncated))
            progress.count_step(rewards, terminated, truncated, request.env_indices)
            if self.autoreset_lanes:
                progress.count_reset(self.autoreset_lanes)
            progress.end()
        return super().complete(outcome, now_ns)
