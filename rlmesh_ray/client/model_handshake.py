"""Handshake of a client with a ModelService."""

from collections.abc import Callable
from dataclasses import replace

from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.model_dialect import (
    DialectModelSession,
    EditionModelClientDialect,
    ModelClientDialect,
)
from rlmesh_ray.client.version_negotiation import ServiceHandshake
from rlmesh_ray.dialects.registry import client_dialect
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.capabilities import IMAGE_CODEC, PROTOCOL_V1
from rlmesh_ray.protocol.handshake import HandshakeResponse
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire import policy_v1
from rlmesh_ray.wire.image_codec_v1 import SentImages, require_offer
from rlmesh_ray.wire.policy_v1 import PolicyFacts
from rlmesh_ray.wire.rlmesh_v1 import model as edition_wire

ModelDialectFactory = Callable[[str], ModelClientDialect]
"""Makes the dialect of a session with this id."""
HANDSHAKE: ServiceHandshake[ModelDialectFactory] = ServiceHandshake(
    "/rlmesh.model.v1.ModelService/Handshake",
    edition_wire,
    (capabilities.SPACES_CORE, capabilities.POLICY, capabilities.ACTION_CHUNKS),
    EditionModelClientDialect,
    "client.model_dialect",
)
generations_of = HANDSHAKE.generations

_MOST_DIGITS = 10


def shake_hands(connect_options: ConnectOptions) -> HandshakeResponse:
    """Return a model endpoint's answer to the handshake, without opening a session.

    Raises:
        EndpointError: It cannot be reached.
        HandshakeRefusedError: It serves no generation or edition of this package.
    """
    session = open_dialect_session(connect_options)
    if session is not None:
        session.close()
        return session.answer
    with connect_options.open() as channel:
        return HANDSHAKE.negotiate(connect_options, channel)[1]


def open_dialect_session(connect_options: ConnectOptions) -> DialectModelSession | None:
    """Open a session in the dialect that the address names; None: it names none.

    Raises:
        ConfigurationError: The dialect's servers serve environments.
        MissingPackageError: The dialect's extra is not installed.
        EndpointError: The server cannot be reached.
    """
    dialect = client_dialect(connect_options.address)
    if dialect is None:
        return None
    if not dialect.serves_models:
        raise ConfigurationError(
            f"{connect_options.address} is an environment, since {dialect.name} serves nothing "
            "else; give the address of a policy"
        )
    dialect.require_installed()
    session: DialectModelSession = dialect.load("client").MODEL_SESSION(connect_options)
    return session


def policy_of(answer: HandshakeResponse) -> PolicyFacts:
    """Return the facts about the policy in a model endpoint's answer; empty: it has none."""
    return policy_v1.parse(answer.capabilities.get(capabilities.POLICY, ""))


def horizon_of(answer: HandshakeResponse) -> int | None:
    """Return how many actions the policy chooses at once, by a model endpoint's answer.

    None: the endpoint's generation reports it for each route, or not at all.
    """
    if answer.generation != PROTOCOL_V1:
        return None
    text = answer.capabilities.get(capabilities.ACTION_CHUNKS, "")
    # Longer numbers are no horizon of a policy, and Python's int may refuse them.
    return max(1, int(text)) if text.isdecimal() and len(text) < _MOST_DIGITS else 1


def compressed(
    contract: EnvContract, image_codec: str, answer: HandshakeResponse, address: str
) -> EnvContract:
    """Return a route's contract for an endpoint, which says that its images travel compressed.

    Args:
        contract: Contract of the environment.
        image_codec: See ``RemoteModel.configure_route``.
        answer: The endpoint's answer to the handshake.
        address: The endpoint's.

    Raises:
        ConfigurationError: ``image_codec`` does not fit the observation space or the endpoint.
    """
    images = SentImages(contract, image_codec, {})
    require_offer(f"{image_codec=}", images.format, answer.capabilities, address)
    return replace(contract, metadata={**contract.metadata, IMAGE_CODEC: image_codec})
