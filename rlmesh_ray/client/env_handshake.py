"""Handshake of a client with an EnvService, and the connection for a session."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from rlmesh_ray.client.channel import ConnectOptions, Metadata
from rlmesh_ray.client.env_dialect import EditionEnvClientDialect, EnvClientDialect
from rlmesh_ray.client.version_negotiation import ServiceHandshake
from rlmesh_ray.errors import HandshakeRefusedError
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.handshake import HandshakeResponse
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.images import AS_THEY_ARE, ImageOptions, as_sizes
from rlmesh_ray.wire import image_codec_v1
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
EnvDialectFactory = Callable[[EnvContract], EnvClientDialect]
"""Makes the dialect of a session with this contract."""
HANDSHAKE: ServiceHandshake[EnvDialectFactory] = ServiceHandshake(
    "/rlmesh.env.v1.EnvService/Handshake",
    edition_wire,
    _ABLE,
    EditionEnvClientDialect,
    "client.env_dialect",
)
generations_of = HANDSHAKE.generations


@dataclass(frozen=True, slots=True)
class EnvConnection:
    """A connection to an endpoint, for one session."""

    channel: grpc.Channel
    """Accepts the largest message that is possible under the contract."""
    answer: HandshakeResponse
    contract: EnvContract
    """The endpoint's, with the images of the observations in the size in which they come."""
    metadata: Metadata
    """The metadata of the session's calls."""
    session_id: str
    """Empty: the endpoint has given none."""
    dialect: EnvClientDialect
    """The dialect of the endpoint's generation."""


def shake_hands(connect_options: ConnectOptions) -> HandshakeResponse:
    """Return an endpoint's answer to the handshake, without opening a session.

    Raises:
        EndpointError: It cannot be reached.
        HandshakeRefusedError: It serves no generation or edition of this package.
    """
    with connect_options.open() as channel:
        return HANDSHAKE.negotiate(connect_options, channel)[1]


def connect(connect_options: ConnectOptions, images: ImageOptions = AS_THEY_ARE) -> EnvConnection:
    """Shake hands and return a channel for one session, which is the caller's to close.

    Args:
        connect_options: The endpoint.
        images: See ``RemoteEnv``.

    Raises:
        ConfigurationError: ``images`` do not fit the environment or the endpoint.
        EndpointError: The endpoint cannot be reached, or wants another token.
        HandshakeRefusedError: It serves no generation or edition of this package, or its contract
            allows no session.
    """
    channel = connect_options.open()
    try:
        connection = _connection(connect_options, channel, images)
        limit = max_response_bytes(connection.contract)
        if limit > DEFAULT_MESSAGE_BYTES:
            channel.close()
            channel = connect_options.open(limit)
            # Behind a gateway, another connection may lead to another endpoint.
            connection = _connection(connect_options, channel, images)
    except BaseException:
        channel.close()
        raise
    return connection


def _connection(
    connect_options: ConnectOptions, channel: grpc.Channel, images: ImageOptions
) -> EnvConnection:
    variant, answer = HANDSHAKE.negotiate(connect_options, channel)
    contract = _contract(answer, connect_options.address)
    metadata, dialect = connect_options.metadata, variant.make_dialect(contract)
    if images.names:
        image_codec, resize = images
        space = contract.observation_space
        sizes = {} if resize is None else as_sizes(resize, space)
        sent = image_codec_v1.session_images(contract, image_codec, sizes)
        needed = {
            f"{image_codec=}": sent.format,
            f"{resize=}": capabilities.RESIZE if sizes else "",
        }
        for option, ability in needed.items():
            image_codec_v1.require_offer(
                option, ability, answer.capabilities, connect_options.address
            )
        metadata += image_codec_v1.session_metadata(space, image_codec, sizes)
        contract = replace(contract, observation_space=sent.space)
        # Only the edition's generation has the capability.
        dialect = EditionEnvClientDialect(contract, sent.values)
    session_id = answer.capabilities.get(capabilities.SESSION, "")
    if session_id:
        metadata += ((capabilities.SESSION_METADATA_KEY, session_id),)
    return EnvConnection(channel, answer, contract, metadata, session_id, dialect)


def _contract(answer: HandshakeResponse, address: str) -> EnvContract:
    contract = answer.contract
    if not isinstance(contract, EnvContract):
        raise HandshakeRefusedError(
            f"{address}: the server accepts the handshake without an environment contract; "
            "it breaks the protocol, another version of it may not"
        )
    if contract.num_envs < 1:
        raise HandshakeRefusedError(
            f"{address}: the server's contract has {contract.num_envs} lanes; it needs at least 1"
        )
    return contract
