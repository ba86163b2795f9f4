"""What a runner does about sessions that end in the middle: those that fail, and those that move.

Either way their running episodes end where they stand, and new sessions are opened.
"""

import abc
import logging
import time
from collections.abc import Sequence
from typing import Any

from ray.rllib.env.env_runner import NUM_ENV_STEP_FAILURES_LIFETIME, EnvRunner

from rlmesh_ray.errors import EndpointClosedError, RlmeshError
from rlmesh_ray.rllib.lane_slot import LaneSlot, Phase
from rlmesh_ray.rllib.quota import Quota
from rlmesh_ray.rllib.runner_lanes import Lanes
from rlmesh_ray.rllib.seats import Seats

_LOG = logging.getLogger(__name__)

NUM_EPISODES_INTERRUPTED_LIFETIME = "num_episodes_interrupted_lifetime"
"""Metric: episodes that a failure has cut short."""
NUM_SESSIONS_MOVED_LIFETIME = "num_sessions_moved"
"""Metric: sessions that have gone to another endpoint because the directory asked them to."""


class LostAndMoved(EnvRunner):
    """Sees to the sessions that a ``SlotRunner`` loses, and to those that are to go elsewhere."""

    _lanes: Sequence[Lanes] = ()
    _seats: Seats
    _quota: Quota
    _ongoing_episodes: list[Any]
    _interrupted: list[Any]
    """Episodes that were cut short in this call of ``sample``."""

    @abc.abstractmethod
    def _cut_short(self, lane: int, error: RlmeshError) -> Any | None:
        """End a lane's running episode; return it unless all it holds has been returned before."""

    # --- failures ------------------------------------------------------------------------

    def _open_anew(self, lanes: Lanes, error: Exception) -> None:
        """End the episodes of a slot that has failed, and have it opened again.

        Raises:
            Exception: There is no use in that, or it is a fault: ``error`` itself.
        """
        slot = lanes.slot
        if not isinstance(error, RlmeshError):
            slot.reopen(0.0)
            raise error
        if slot.phase is not Phase.OPENING:
            self.metrics.log_value(NUM_ENV_STEP_FAILURES_LIFETIME, 1, reduce="lifetime_sum")
        slot.phase = Phase.OPENING
        self._seats.vacate(lanes.sessions)
        num_cut = self._interrupt(slot, error)
        if num_cut:
            key = NUM_EPISODES_INTERRUPTED_LIFETIME
            self.metrics.log_value(key, num_cut, reduce="lifetime_sum")
        others_work = any(other.slot.phase is not Phase.OPENING for other in self._lanes)
        delay_s = slot.patience.failed(error, time.monotonic(), others_work=others_work)
        if delay_s is None:
            # Whoever calls again gets another try.
            slot.patience.succeeded()
            slot.reopen(0.0)
            raise error
        _LOG.warning(
            "worker %s, lanes %d to %d: %s; a new session is opened in %.2g s (failure %d)",
            self.worker_index,
            slot.lanes.start,
            slot.lanes.stop - 1,
            error,
            delay_s,
            slot.patience.num_failures,
        )
        lanes.to_module = None
        lanes.shared_data = {}
        slot.reopen(delay_s)

    def _interrupt(self, slot: LaneSlot, cause: RlmeshError) -> int:
        """Cut a slot's running episodes short, to be returned; return how many they are."""
        num_cut = 0
        for lane in slot.lanes:
            episode = self._ongoing_episodes[lane]
            if not episode.is_reset:
                continue  # nothing has happened in it
            returned = self._cut_short(lane, cause)
            self._ongoing_episodes_for_metrics.pop(episode.id_, None)
            num_cut += 1
            if returned is not None:
                self._interrupted.append(returned)
        return num_cut

    # --- moves ---------------------------------------------------------------------------

    def _move_sessions(self) -> None:
        """Have the sessions that are asked to move opened elsewhere, with new episodes.

        At the end of ``sample``, so that the last chunk of what is cut says so, and the new
        sessions are ready for the next call.
        """
        moving = self._seats.asked_to_move()
        for lanes in self._lanes:
            leaving = moving.intersection(lanes.sessions)
            if leaving and lanes.slot.phase is not Phase.OPENING:
                self._move(lanes, leaving)

    def _move(self, lanes: Lanes, leaving: frozenset[int]) -> None:
        slot = lanes.slot
        former = ", ".join(sorted({self._seats.endpoint_of(number) for number in leaving}))
        if self._quota.num_episodes is None:  # else nobody goes on with what is running
            cause = f"the session goes on elsewhere, since it was to leave endpoint {former}"
            self._interrupt(slot, EndpointClosedError(cause))
        self.metrics.log_value(NUM_SESSIONS_MOVED_LIFETIME, len(leaving), reduce="lifetime_sum")
        _LOG.info(
            "worker %s, lanes %d to %d: %d session(s) leave endpoint %s for another one",
            self.worker_index,
            slot.lanes.start,
            slot.lanes.stop - 1,
            len(leaving),
            former,
        )
        self._seats.vacate(leaving)
        lanes.to_module = None
        lanes.shared_data = {}
        slot.reopen(0.0, in_background=True)
