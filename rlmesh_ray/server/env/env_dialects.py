"""Server dialects of sessions with an environment: how a stream's frames and values are encoded.

What generations differ in by meaning stands in their rules, which the session applies. No code asks
which generation it serves, but for the choice of the dialect when a stream begins.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlmesh_ray.dialects import registry
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol.capabilities import PROTOCOL_V1
from rlmesh_ray.protocol.env_session import EDITION_2026_06_RULES, EnvRules
from rlmesh_ray.protocol.messages import (
    EnvRequest,
    EnvResponse,
    EnvTimings,
    Infos,
    MalformedRequest,
)
from rlmesh_ray.server.endpoint.drain import Drain
from rlmesh_ray.server.endpoint.handshake_service import GenerationHandshake
from rlmesh_ray.server.env.worker_pool import WorkerPool
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.spec import SpaceSpec
from rlmesh_ray.spaces.validation import warnings_as_texts
from rlmesh_ray.wire.rlmesh_v1 import env as edition_frames
from rlmesh_ray.wire.rlmesh_v1 import values as edition_values
from rlmesh_ray.wire.rlmesh_v1.handshake import HandshakeFrames
from rlmesh_ray.wire.rlmesh_v1.values import BatchCodec


class EnvServerFrames(Protocol):
    """A dialect's wire module for EnvService."""

    HANDSHAKE: HandshakeFrames

    def parse_request(self, data: bytes) -> EnvRequest | MalformedRequest:
        """Return the request in a frame; never raises."""

    def pack_response(self, response: EnvResponse, *, tag_arrays: bool) -> bytes:
        """Return the frame of a response; arrays in infos keep their dtype if they are tagged."""


@dataclass(frozen=True, slots=True)
class EnvServerDialect:
    """One generation's part in a session with an environment."""

    name: str
    """The generation's."""
    frames: EnvServerFrames
    codec: Callable[[SpaceSpec], BatchCodec]
    """Returns the codec of a space."""
    rules: EnvRules
    infos: Callable[[Infos, Sequence[int], int], Infos]
    """Converts the infos of a vector to the dialect's form, given the lanes that the response is
    about, and the width of the vector."""
    with_timings: Callable[[bytes, EnvTimings], bytes] | None = None
    """Adds the time that a request took to its response; None: the dialect has no such field."""
    handshake: GenerationHandshake | None = None
    """None for the edition's generation."""
    subset_capabilities: Mapping[str, str] = field(default_factory=dict)
    """Offered where single lanes can be stepped; those of the edition are EnvService's."""

    @property
    def handshake_frames(self) -> HandshakeFrames:
        return self.frames.HANDSHAKE


EDITION_DIALECT = EnvServerDialect(
    PROTOCOL_V1,
    edition_frames,
    edition_values.codec,
    EDITION_2026_06_RULES,
    lambda infos, _lanes, _num_lanes: warnings_as_texts(infos),
)


def load_env_dialects() -> dict[str, EnvServerDialect]:
    """Return the dialects of EnvService, by generation; the first is the edition's."""
    return {PROTOCOL_V1: EDITION_DIALECT, **registry.load_generations("server.env_dialect")}


class DialectService(Protocol):
    """A gRPC service that a dialect adds to the endpoint of an environment.

    ``pool`` is started and starts the workers of the service's sessions; the other arguments are
    those of ``EnvService`` and ``EnvServer``.
    """

    def __init__(
        self,
        pool: WorkerPool,
        contract: EnvContract,
        drain: Drain,
        idle_timeout_s: float | None = None,
    ) -> None: ...

    @property
    def max_request_bytes(self) -> int:
        """Size of the largest request that a client can have a use for."""

    @property
    def streams_per_session(self) -> int:
        """How many streams a session may have."""

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the gRPC handlers of the service."""


def load_dialect_services(enabled: Collection[str]) -> list[type[DialectService]]:
    return [
        each.load("server.service").ENV_SERVICE
        for each in registry.DIALECTS
        if each.service and each.name in enabled
    ]
