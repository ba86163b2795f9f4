"""Server dialect of ``rlmesh-wire-v1`` for sessions with a policy: lanes, request ids, timings.

Rule 1: a frame becomes one or several requests of the core (one a group), or a malformed one. It
is answered once, when all of its requests have been.
Rule 2: the core's requests have ids of their own, since a client may use one twice.
Rule 3: an adapter is a route, by the id of its environment; its session id is ignored.
Rule 4: the order of requests is not decided here.
Rule 5: the dialect names neither a route's width nor a row's lane, only the episode of each row. An
episode gets a lane with its first row, and keeps it until the client reports its end.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rlmesh_ray.dialects.released.protocol import MODEL_RULES, GroupedPredict, GroupedPredicted
from rlmesh_ray.dialects.released.server.env_dialect import HANDSHAKE
from rlmesh_ray.dialects.released.wire import model as wire
from rlmesh_ray.dialects.released.wire import values
from rlmesh_ray.dialects.released.wire.model import FrameResponse
from rlmesh_ray.errors import CapacityError, CodecError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.messages import CloseModel, Predicted, PredictSlot
from rlmesh_ray.protocol.model_session import (
    ModelSession,
    RouteLanes,
    SessionEvent,
    SessionResponse,
    check_id_lengths,
)
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire.rlmesh_v1.handshake import HandshakeFrames
from rlmesh_ray.wire.rlmesh_v1.values import ContractCodecs

MAX_EPISODES = 2**16
"""Episodes that one session may have at a time. A policy may keep a state for each of them, and
their number would grow without bound if a client never reported an end."""


class EpisodeLimit:
    """Counts the episodes that have a lane, over all routes of a session.

    Args:
        limit: How many are allowed.
    """

    def __init__(self, limit: int = MAX_EPISODES) -> None:
        self.count = 0
        self._limit = limit

    def add(self, count: int) -> None:
        """Count ``count`` more. Raises CapacityError when they are too many."""
        if self.count + count > self._limit:
            raise CapacityError(
                f"the session would have {self.count + count} episodes, and {self._limit} are the "
                "limit: report the ended ones (reset_adapter), or open another session"
            )
        self.count += count


@dataclass(slots=True)
class _EpisodeLane:
    lane: int
    has_begun: bool = False
    """Whether the policy has chosen an action for the episode."""


class EpisodeLanes(RouteLanes):
    """A lane for each episode that runs; freed lanes are used again.

    A row is the first of its episode until a row of it has been answered with actions.

    Args:
        held: Counts the episodes of all routes of the session.
    """

    def __init__(self, held: EpisodeLimit) -> None:
        self._held = held
        self._lanes: dict[str, _EpisodeLane] = {}
        self._free: list[int] = []

    def assign_lanes(self, slots: Sequence[PredictSlot]) -> Sequence[PredictSlot]:
        episodes = [slot.episode_id for slot in slots]
        _check_episodes(episodes)
        new = [episode for episode in episodes if episode not in self._lanes]
        check_id_lengths(new)
        self._held.add(len(new))
        for episode in new:
            # Without a gap in them, there are as many lanes as episodes.
            self._lanes[episode] = _EpisodeLane(
                self._free.pop() if self._free else len(self._lanes)
            )
        return tuple(self._assigned(slot) for slot in slots)

    def note_failed(self, slots: Sequence[PredictSlot]) -> None:
        """Make the next row of an episode its first again, if the failed row was that."""
        for slot in slots:
            self._lanes[slot.episode_id].has_begun = not slot.reset

    def lanes_of(self, episode_ids: Sequence[str]) -> list[int]:
        """Return the lanes of those episodes that are known, each once."""
        return [self._lanes[episode].lane for episode in self._known(episode_ids)]

    def free(self, episode_ids: Sequence[str]) -> None:
        known = self._known(episode_ids)
        self._free += [self._lanes.pop(episode).lane for episode in known]
        self._held.count -= len(known)

    def clear(self) -> None:
        self.free(tuple(self._lanes))

    def _known(self, episode_ids: Sequence[str]) -> list[str]:
        return [episode for episode in dict.fromkeys(episode_ids) if episode in self._lanes]

    def _assigned(self, slot: PredictSlot) -> PredictSlot:
        episode_lane = self._lanes[slot.episode_id]
        is_first, episode_lane.has_begun = not episode_lane.has_begun, True
        return PredictSlot(episode_lane.lane, slot.episode_id, slot.step, is_first)


def _check_episodes(episodes: Sequence[str]) -> None:
    if not episodes:
        raise CodecError("predict names no episodes; give episode_info for each row")
    if "" in episodes:
        raise CodecError("predict has an empty episode_id; each row needs the id of its episode")
    if len(set(episodes)) < len(episodes):
        raise CodecError("predict names an episode twice; each row needs one of its own")


@dataclass(slots=True, eq=False)
class PendingFrame:
    """A frame that has not been answered, with the answers to its requests so far."""

    request_id: str
    """The client's."""
    is_grouped: bool
    """Whether its answers are the results of groups; if not, it has one."""
    arrived_ns: int
    decode_ns: int
    """Time to decode the frame."""
    answers: list[Any]
    """One for each of the core's requests."""
    num_left: int

    def response(self) -> FrameResponse:
        if self.is_grouped:
            return GroupedPredicted(self.request_id, tuple(self.answers))
        response: SessionResponse = self.answers[0]
        return response

    def timings(
        self, *, ended_ns: int, encode_ns: int, in_flight: int, held_episodes: int
    ) -> dict[str, int]:
        """Return the timings of the answer, by the names of its fields.

        Args:
            ended_ns: When its frame was encoded.
            encode_ns: Time to encode it.
            in_flight: Requests of the stream that have not been answered, this one included.
            held_episodes: Episodes of the stream.
        """
        timings = {"endpoint_total_ns": ended_ns - self.arrived_ns, "in_flight": in_flight}
        predicted = [answer for answer in self.answers if isinstance(answer, Predicted)]
        # Groups that ran in one batch share its times.
        runs = {id(answer.run): answer.run for answer in predicted if answer.run is not None}
        if not runs:
            return timings
        return timings | {
            "decode_ns": self.decode_ns + sum(run.decode_ns for run in runs.values()),
            "user_ns": sum(run.forward_ns for run in runs.values()),
            "encode_ns": encode_ns + sum(run.encode_ns for run in runs.values()),
            "queue_ns": max(answer.queue_ns for answer in predicted),
            "held_episodes": held_episodes,
        }


class ReleasedModelServerDialect:
    """``rlmesh-wire-v1``: the requests of a frame get ids of their own for the session."""

    handshake_frames: ClassVar[HandshakeFrames] = wire.HANDSHAKE
    handshake = HANDSHAKE
    # No observation history: a policy keeps what it has to remember.
    capabilities: ClassVar[Mapping[str, str]] = {capabilities.CONCURRENT_PREDICT: capabilities.YES}
    rules = MODEL_RULES

    def __init__(self) -> None:
        self._outstanding: dict[str, tuple[PendingFrame, int]] = {}
        """By the core's request id: the frame, and the request's index in it."""
        self._num_requests = 0
        self._num_in_flight = 0
        self._is_closing = False
        self._held = EpisodeLimit()

    def receive(self, session: ModelSession, frame: bytes) -> list[SessionEvent]:
        arrived_ns = time.perf_counter_ns()
        request = wire.parse_request(frame)
        decode_ns = time.perf_counter_ns() - arrived_ns
        # After Close, the core refuses the frame as one request.
        is_grouped = isinstance(request, GroupedPredict) and not self._is_closing
        self._is_closing = self._is_closing or isinstance(request, CloseModel)
        requests = request.groups if isinstance(request, GroupedPredict) else (request,)
        if not is_grouped:
            requests = requests[:1]
        pending = PendingFrame(
            request.request_id,
            is_grouped,
            arrived_ns,
            decode_ns,
            [None] * len(requests),
            len(requests),
        )
        self._num_in_flight += 1
        following: list[SessionEvent] = []
        for place, each in enumerate(requests):
            self._num_requests += 1
            own_id = str(self._num_requests)
            self._outstanding[own_id] = pending, place
            following += session.receive(replace(each, request_id=own_id))
        return following

    def frame(self, response: SessionResponse) -> bytes | None:
        pending, place = self._outstanding.pop(response.request_id)
        pending.answers[place] = response
        pending.num_left -= 1
        if pending.num_left:
            return None
        begun_ns = time.perf_counter_ns()
        packed = wire.pack_response(pending.response(), pending.request_id)
        ended_ns = time.perf_counter_ns()
        timings = pending.timings(
            ended_ns=ended_ns,
            encode_ns=ended_ns - begun_ns,
            in_flight=self._num_in_flight,
            held_episodes=self._held.count,
        )
        self._num_in_flight -= 1
        return wire.with_timings(packed, timings)

    def lanes(self, contract: EnvContract) -> RouteLanes:
        return EpisodeLanes(self._held)

    def codecs(self, contract: EnvContract) -> ContractCodecs:
        return ContractCodecs.made_by(values.codec, contract)


DIALECT = ReleasedModelServerDialect
