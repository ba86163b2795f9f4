"""How a client finds out what an EnvService is, and connects to it."""

from dataclasses import dataclass, replace

from rlmesh_ray.client.channel import Dial, Metadata
from rlmesh_ray.client.env_tongue import EditionTongue, EnvTongue
from rlmesh_ray.client.greeting import Greeting, greet, greetings_of, understood
from rlmesh_ray.client.released.env_tongue import ReleasedTongue
from rlmesh_ray.errors import HandshakeRefusedError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.generations import WIRE_V1
from rlmesh_ray.protocol.handshake import Answer
from rlmesh_ray.rpc import grpc
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire.rlmesh_v1 import env as edition_wire
from rlmesh_ray.wire.rlmesh_v1.limits import DEFAULT_MESSAGE_BYTES, max_response_bytes
from rlmesh_ray.wire.rlmesh_wire_v1 import env as released_wire

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
class Connection:
    """A way to an endpoint on which a session can be held."""

    channel: grpc.Channel
    """Takes the largest message that the contract can lead to."""
    answer: Answer
    contract: EnvContract
    metadata: Metadata
    """What the calls of the session carry."""
    session_id: str
    """Empty where the endpoint gives none."""
    tongue: EnvTongue
    """Of the generation that the endpoint speaks."""


def shake_hands(dial: Dial) -> Answer:
    """Ask an endpoint what it is, without opening a session.

    Raises:
        EndpointError: It cannot be reached.
        HandshakeRefusedError: It speaks no generation or edition of this package.
    """
    channel = dial.open()
    try:
        return _handshake(dial, channel)[1]
    finally:
        channel.close()


def generations_of(dial: Dial) -> tuple[str, ...]:
    """Return the generations in which an endpoint can be talked to.

    Raises:
        EndpointError: It cannot be reached.
    """
    channel = dial.open()
    try:
        return understood(dial, channel, _HANDSHAKE, _greetings(dial))
    finally:
        channel.close()


def connect(dial: Dial) -> Connection:
    """Shake hands and return a channel for one session, which is the caller's to close.

    Raises:
        EndpointError: The endpoint cannot be reached, or wants another token.
        HandshakeRefusedError: It speaks no generation or edition of this package, or no session
            can be held under its contract.
    """
    channel = dial.open()
    try:
        generation, answer = _handshake(dial, channel)
        contract = _contract(answer, dial.address)
        if max_response_bytes(contract) > DEFAULT_MESSAGE_BYTES:
            channel.close()
            channel = dial.open(max_response_bytes(contract))
            # Behind a gateway, another connection may lead to another endpoint.
            generation, answer = _handshake(dial, channel)
            contract = _contract(answer, dial.address)
    except BaseException:
        channel.close()
        raise
    session_id = answer.capabilities.get(capabilities.SESSION, "")
    own = ((capabilities.SESSION_METADATA_KEY, session_id),) if session_id else ()
    tongue: EnvTongue = EditionTongue(contract)
    if generation == WIRE_V1:
        tongue = ReleasedTongue(contract)
    return Connection(channel, answer, contract, dial.metadata + own, session_id, tongue)


def _handshake(dial: Dial, channel: grpc.Channel) -> tuple[str, Answer]:
    greeting, answer = greet(dial, channel, _HANDSHAKE, _greetings(dial))
    if greeting.generation == WIRE_V1:
        answer = replace(answer, capabilities=_as_told_here(answer))
    return greeting.generation, answer


def _greetings(dial: Dial) -> tuple[Greeting, ...]:
    return greetings_of(dial, edition_wire, released_wire, _ABLE)


def _as_told_here(answer: Answer) -> dict[str, str]:
    """Return the capabilities of a released endpoint, with our names for what we know, too."""
    told = dict(answer.capabilities)
    # Only the edition says what travels there, and how requests are numbered.
    told.pop(capabilities.SHARED_MEMORY, None)
    told.pop(capabilities.DIRECT_TCP, None)
    told.pop(capabilities.NUMBERED_REQUESTS, None)
    if told.get(capabilities.SUBSET_STEP) == capabilities.YES:
        told[capabilities.PARTIAL_RESET] = ""
    return told


def _contract(answer: Answer, address: str) -> EnvContract:
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
