"""How a client finds out what an EnvService is, and connects to it."""

from dataclasses import dataclass

import grpc

from rlmesh_ray import __version__
from rlmesh_ray.client.channel import Dial, Metadata, handshake_with
from rlmesh_ray.errors import HandshakeRefusedError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.handshake import Answer, check_answer, make_offer
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire.rlmesh_v1 import env as wire
from rlmesh_ray.wire.rlmesh_v1.limits import DEFAULT_MESSAGE_BYTES, max_response_bytes

_ABLE = (
    capabilities.NDARRAY,
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


def shake_hands(dial: Dial) -> Answer:
    """Ask an endpoint what it is, without opening a session.

    Raises:
        EndpointError: It cannot be reached.
        HandshakeRefusedError: It does not speak this package's generation or edition.
    """
    channel = dial.open()
    try:
        return _handshake(dial, channel)
    finally:
        channel.close()


def connect(dial: Dial) -> Connection:
    """Shake hands and return a channel for one session, which is the caller's to close.

    Raises:
        EndpointError: The endpoint cannot be reached, or wants another token.
        HandshakeRefusedError: It does not speak this package's generation or edition, or no
            session can be held under its contract.
    """
    channel = dial.open()
    try:
        answer = _handshake(dial, channel)
        contract = _contract(answer, dial.address)
    except BaseException:
        channel.close()
        raise
    if max_response_bytes(contract) > DEFAULT_MESSAGE_BYTES:
        channel.close()
        channel = dial.open(max_response_bytes(contract))
    session_id = answer.capabilities.get(capabilities.SESSION, "")
    own = ((capabilities.SESSION_METADATA_KEY, session_id),) if session_id else ()
    return Connection(channel, answer, contract, dial.metadata + own, session_id)


def _handshake(dial: Dial, channel: grpc.Channel) -> Answer:
    offer = make_offer(
        "rlmesh-ray",
        __version__,
        dict.fromkeys(_ABLE, ""),
        text=dial.text_sha256,
    )
    reply = dial.call(channel, _HANDSHAKE, wire.pack_offer(offer))
    with handshake_with(dial.address):
        answer: Answer = wire.parse_answer(reply)
        check_answer(offer, answer)
    return answer


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
