"""How a client finds out what an EnvService is, and connects to it."""

from dataclasses import dataclass, replace

from rlmesh_ray.client.channel import ConnectOptions, Metadata
from rlmesh_ray.client.env_dialect import EditionEnvClientDialect, EnvClientDialect
from rlmesh_ray.client.version_negotiation import (
    HandshakeVariant,
    handshake_variants,
    negotiate_handshake,
    supported_generations,
)
from rlmesh_ray.dialects.released.client.env_dialect import ReleasedEnvClientDialect
from rlmesh_ray.dialects.released.wire import env as released_wire
from rlmesh_ray.errors import HandshakeRefusedError
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.handshake import HandshakeResponse
from rlmesh_ray.protocol.versions import WIRE_V1
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire.rlmesh_v1 import env as edition_wire
from rlmesh_ray.wire.rlmesh_v1.limits import DEFAULT_MESSAGE_BYTES, max_response_bytes

_ABLE = (
    capabilities.DIRECT_TCP,
    capabilities.NDARRAY,
    capabilities.NUMBERED_REQUESTS,
    capabilities.SAME_STEP,
    capabilities.SHARED_MEMORY,
    capabilities.SPACES_CORE,
)
_HANDSHAKE = "/rlmesh.env.v1.EnvService/Handshake"


@dataclass(frozen=True, slots=True)
class EnvConnection:
    """A way to an endpoint on which a session can be held."""

    channel: grpc.Channel
    """Takes the largest message that the contract can lead to."""
    answer: HandshakeResponse
    contract: EnvContract
    metadata: Metadata
    """What the calls of the session carry."""
    session_id: str
    """Empty where the endpoint gives none."""
    dialect: EnvClientDialect
    """Of the generation that the endpoint speaks."""


def shake_hands(connect_options: ConnectOptions) -> HandshakeResponse:
    """Ask an endpoint what it is, without opening a session.

    Raises:
        EndpointError: It cannot be reached.
        HandshakeRefusedError: It speaks no generation or edition of this package.
    """
    channel = connect_options.open()
    try:
        return _handshake(connect_options, channel)[1]
    finally:
        channel.close()


def generations_of(connect_options: ConnectOptions) -> tuple[str, ...]:
    """Return the generations in which an endpoint can be talked to.

    Raises:
        EndpointError: It cannot be reached.
    """
    channel = connect_options.open()
    try:
        return supported_generations(
            connect_options, channel, _HANDSHAKE, _handshake_variants(connect_options)
        )
    finally:
        channel.close()


def connect(connect_options: ConnectOptions) -> EnvConnection:
    """Shake hands and return a channel for one session, which is the caller's to close.

    Raises:
        EndpointError: The endpoint cannot be reached, or wants another token.
        HandshakeRefusedError: It speaks no generation or edition of this package, or no session
            can be held under its contract.
    """
    channel = connect_options.open()
    try:
        generation, answer = _handshake(connect_options, channel)
        contract = _contract(answer, connect_options.address)
        if max_response_bytes(contract) > DEFAULT_MESSAGE_BYTES:
            channel.close()
            channel = connect_options.open(max_response_bytes(contract))
            # Behind a gateway, another connection may lead to another endpoint.
            generation, answer = _handshake(connect_options, channel)
            contract = _contract(answer, connect_options.address)
    except BaseException:
        channel.close()
        raise
    session_id = answer.capabilities.get(capabilities.SESSION, "")
    own = ((capabilities.SESSION_METADATA_KEY, session_id),) if session_id else ()
    dialect: EnvClientDialect = EditionEnvClientDialect(contract)
    if generation == WIRE_V1:
        dialect = ReleasedEnvClientDialect(contract)
    return EnvConnection(
        channel, answer, contract, connect_options.metadata + own, session_id, dialect
    )


def _handshake(
    connect_options: ConnectOptions, channel: grpc.Channel
) -> tuple[str, HandshakeResponse]:
    variant, answer = negotiate_handshake(
        connect_options, channel, _HANDSHAKE, _handshake_variants(connect_options)
    )
    if variant.generation == WIRE_V1:
        answer = replace(answer, capabilities=_as_told_here(answer))
    return variant.generation, answer


def _handshake_variants(connect_options: ConnectOptions) -> tuple[HandshakeVariant, ...]:
    return handshake_variants(connect_options, edition_wire, released_wire, _ABLE)


def _as_told_here(answer: HandshakeResponse) -> dict[str, str]:
    """Return the capabilities of a released endpoint, with our names for what we know, too."""
    told = dict(answer.capabilities)
    # Only the edition says what travels there, and how requests are numbered.
    told.pop(capabilities.SHARED_MEMORY, None)
    told.pop(capabilities.DIRECT_TCP, None)
    told.pop(capabilities.NUMBERED_REQUESTS, None)
    if told.get(capabilities.SUBSET_STEP) == capabilities.YES:
        told[capabilities.PARTIAL_RESET] = ""
    return told


def _contract(answer: HandshakeResponse, address: str) -> EnvContract:
    """Return the contract of a compatible answer, if a session can be held under it."""
    contract = answer.contract
    if not isinstance(contract, EnvContract):
        raise HandshakeRefusedError(
            f"{address}: the server says that it is compatible, but tells no environment contract; "
            "it breaks the protocol, another version of it may not"
        )
    if contract.num_envs < 1:
        raise HandshakeRefusedError(
            f"{address}: the server tells of {contract.num_envs} lanes; it must serve at least 1"
        )
    return contract
