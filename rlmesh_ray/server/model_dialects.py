"""What differs between the streams of a ModelService: their generation, chosen once a stream."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rlmesh_ray.dialects.released.protocol.model_translation import ModelTranslation
from rlmesh_ray.dialects.released.wire import model as released
from rlmesh_ray.dialects.released.wire import values as released_values
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.model_rules import (
    EDITION_2026_06_RULES,
    RELEASED_2026_06_RULES,
    ModelRules,
    SessionResponse,
)
from rlmesh_ray.protocol.model_session import ModelSession, ModelSessionOutput
from rlmesh_ray.protocol.route_lanes import ContractLanes, EpisodeLanes, EpisodeLimit, RouteLanes
from rlmesh_ray.protocol.versions import PROTOCOL_V1, WIRE_V1
from rlmesh_ray.server.batch_codecs import BatchCodecs
from rlmesh_ray.server.handshake_service import ServerHandshakeFrames
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire.rlmesh_v1 import model as edition
from rlmesh_ray.wire.rlmesh_v1 import values as edition_values


class ModelServerDialect(Protocol):
    """How one stream speaks. To be used in the serving loop only."""

    @property
    def rules(self) -> ModelRules:
        """Of the generation."""

    @property
    def values(self) -> BatchCodecs:
        """How observations and actions are encoded."""

    def receive(self, session: ModelSession, frame: bytes) -> list[ModelSessionOutput]:
        """Have the session receive what a frame asks; return what is to be done, in this order."""

    def frame(self, response: SessionResponse) -> bytes | None:
        """Return the frame that a response completes; None: none yet.

        Each frame that came in is answered by one.
        """

    def lanes(self, contract: EnvContract) -> RouteLanes:
        """Return the lanes of a route that is to be configured."""


class EditionModelServerDialect:
    """``rlmesh.protocol.v1``, which is the session's own language."""

    rules = EDITION_2026_06_RULES
    values: BatchCodecs = edition_values

    def __init__(self) -> None:
        # As it is: a method round it would cost a call a message.
        self.frame: Callable[[Any], bytes] = edition.pack_response

    def receive(self, session: ModelSession, frame: bytes) -> list[ModelSessionOutput]:
        """Have the session receive the one request that the frame is."""
        return [session.receive(edition.parse_request(frame))]

    def lanes(self, contract: EnvContract) -> RouteLanes:
        """Return the contract's."""
        return ContractLanes(contract.num_envs)


class ReleasedModelServerDialect:
    """``rlmesh-wire-v1``, which is translated."""

    rules = RELEASED_2026_06_RULES
    values: BatchCodecs = released_values

    def __init__(self) -> None:
        self._translation = ModelTranslation()
        self._held = EpisodeLimit()

    def receive(self, session: ModelSession, frame: bytes) -> list[ModelSessionOutput]:
        """Have the session receive what the frame's message is made of."""
        arrived_ns = time.perf_counter_ns()
        message = released.parse_request(frame)
        decode_ns = time.perf_counter_ns() - arrived_ns
        requests = self._translation.receive(message, arrived_ns, decode_ns)
        return [session.receive(request) for request in requests]

    def frame(self, response: SessionResponse) -> bytes | None:
        """Return the frame, with what it took, when all of its parts are there."""
        in_flight = self._translation.num_in_flight
        exchange = self._translation.answer(response)
        if exchange is None:
            return None
        begun_ns = time.perf_counter_ns()
        packed = released.pack_response(exchange.response())
        ended_ns = time.perf_counter_ns()
        timings = exchange.timings(
            ended_ns=ended_ns,
            encode_ns=ended_ns - begun_ns,
            in_flight=in_flight,
            held_episodes=self._held.count,
        )
        return released.with_timings(packed, timings)

    def lanes(self, contract: EnvContract) -> RouteLanes:
        """Return those of its episodes, none as yet."""
        return EpisodeLanes(self._held)


MODEL_DIALECTS: Mapping[str, Callable[[], ModelServerDialect]] = {
    PROTOCOL_V1: EditionModelServerDialect,
    WIRE_V1: ReleasedModelServerDialect,
}
"""Makes one for a stream, by its generation."""

HANDSHAKES: Mapping[str, ServerHandshakeFrames] = {PROTOCOL_V1: edition, WIRE_V1: released}
"""How each generation opens and ends things."""

CAPABILITIES: Mapping[str, Mapping[str, str]] = {
    PROTOCOL_V1: {
        capabilities.MODEL_SERVICE: "",
        capabilities.CONCURRENT_PREDICT: "",
        capabilities.SPACES_CORE: "",
    },
    # No observation history: a policy here keeps what it wants to remember.
    WIRE_V1: {capabilities.CONCURRENT_PREDICT: capabilities.YES},
}
"""What a model's endpoint can do beyond the edition, by capability, as each generation says it."""
