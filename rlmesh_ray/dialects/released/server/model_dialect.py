"""Server dialect of ``rlmesh-wire-v1`` for sessions with a policy."""

import time
from collections.abc import Mapping
from typing import ClassVar

from rlmesh_ray.dialects.released.protocol.episode_lanes import EpisodeLanes, EpisodeLimit
from rlmesh_ray.dialects.released.protocol.model_translation import ModelTranslation
from rlmesh_ray.dialects.released.protocol.rules import MODEL_RULES
from rlmesh_ray.dialects.released.server.env_dialect import HANDSHAKE
from rlmesh_ray.dialects.released.wire import model as wire
from rlmesh_ray.dialects.released.wire import values
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.model_session import (
    ModelSession,
    ModelSessionOutput,
    RouteLanes,
    SessionResponse,
)
from rlmesh_ray.server.batch_schema import BatchCodecs
from rlmesh_ray.server.handshake_service import HandshakeFrames
from rlmesh_ray.spaces.contract import EnvContract


class ReleasedModelServerDialect:
    """``rlmesh-wire-v1``, whose requests are translated for the session and its responses back."""

    frames: ClassVar[HandshakeFrames] = wire
    handshake = HANDSHAKE
    # No observation history: a policy keeps what it has to remember.
    capabilities: ClassVar[Mapping[str, str]] = {capabilities.CONCURRENT_PREDICT: capabilities.YES}
    rules = MODEL_RULES

    def __init__(self) -> None:
        self._translation = ModelTranslation()
        self._held = EpisodeLimit()

    def receive(self, session: ModelSession, frame: bytes) -> list[ModelSessionOutput]:
        """Pass the requests that the message in a frame consists of to the session."""
        arrived_ns = time.perf_counter_ns()
        message = wire.parse_request(frame)
        decode_ns = time.perf_counter_ns() - arrived_ns
        requests = self._translation.receive(message, arrived_ns, decode_ns)
        return [session.receive(request) for request in requests]

    def frame(self, response: SessionResponse) -> bytes | None:
        """Return the frame of an answer, with its timings, once all of its parts are there."""
        in_flight = self._translation.num_in_flight
        pending = self._translation.answer(response)
        if pending is None:
            return None
        begun_ns = time.perf_counter_ns()
        packed = wire.pack_response(pending.response())
        ended_ns = time.perf_counter_ns()
        timings = pending.timings(
            ended_ns=ended_ns,
            encode_ns=ended_ns - begun_ns,
            in_flight=in_flight,
            held_episodes=self._held.count,
        )
        return wire.with_timings(packed, timings)

    def lanes(self, contract: EnvContract) -> RouteLanes:
        """Return lanes of a route without episodes."""
        return EpisodeLanes(self._held)

    def values(self, contract: EnvContract) -> BatchCodecs:
        """Return the codecs of the dialect."""
        return values


DIALECT = ReleasedModelServerDialect
