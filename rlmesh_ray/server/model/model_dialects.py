"""Server dialects of sessions with a policy: one object a stream, of the stream's generation."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from rlmesh_ray.dialects import registry
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.capabilities import PROTOCOL_V1
from rlmesh_ray.protocol.model_session import (
    EDITION_2026_06_RULES,
    ContractLanes,
    ModelRules,
    ModelSession,
    ModelSessionOutput,
    RouteLanes,
    SessionResponse,
)
from rlmesh_ray.server.endpoint.handshake_service import GenerationHandshake
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire import image_codec_v1
from rlmesh_ray.wire.rlmesh_v1 import model as edition
from rlmesh_ray.wire.rlmesh_v1.handshake import HandshakeFrames
from rlmesh_ray.wire.rlmesh_v1.values import ContractCodecs


class ModelServerDialect(Protocol):
    """One stream's dialect; made without arguments, and used in the serving loop only."""

    handshake_frames: ClassVar[HandshakeFrames]
    handshake: ClassVar[GenerationHandshake | None]
    """None for the edition's generation."""
    capabilities: ClassVar[Mapping[str, str]]
    """What an endpoint of a policy can do beyond the edition, in the generation's terms."""
    rules: ClassVar[ModelRules]

    def receive(self, session: ModelSession, frame: bytes) -> list[ModelSessionOutput]:
        """Pass the requests in a frame to the session; return what follows, in this order."""

    def frame(self, response: SessionResponse) -> bytes | None:
        """Return the frame that a response completes; None: it completes none yet.

        There is one frame for each that has come in.
        """

    def lanes(self, contract: EnvContract) -> RouteLanes:
        """Return the lanes of a route that is to be configured."""

    def codecs(self, contract: EnvContract) -> ContractCodecs:
        """Return the codecs of a route that is to be configured.

        Raises:
            ContractMismatchError: The contract names an encoding that does not fit its spaces.
        """


class EditionModelServerDialect:
    """``rlmesh.protocol.v1``, whose requests are those of the session."""

    handshake_frames: ClassVar[HandshakeFrames] = edition.HANDSHAKE
    handshake = None
    capabilities: ClassVar[Mapping[str, str]] = {
        capabilities.MODEL_SERVICE: "",
        capabilities.CONCURRENT_PREDICT: "",
        capabilities.SPACES_CORE: "",
    }
    rules = EDITION_2026_06_RULES

    def __init__(self) -> None:
        # No method of its own: that would cost a call a message.
        self.frame: Callable[[Any], bytes] = edition.pack_response

    def receive(self, session: ModelSession, frame: bytes) -> list[ModelSessionOutput]:
        return [session.receive(edition.parse_request(frame))]

    def lanes(self, contract: EnvContract) -> RouteLanes:
        return ContractLanes(contract.num_envs)

    def codecs(self, contract: EnvContract) -> ContractCodecs:
        return image_codec_v1.route_codecs(contract)


def load_model_dialects() -> dict[str, type[ModelServerDialect]]:
    """Return the dialects of ModelService, by generation; the first is the edition's."""
    return {
        PROTOCOL_V1: EditionModelServerDialect,
        **registry.load_generations("server.model_dialect"),
    }
