"""How a client finds out what a ModelService is."""

from rlmesh_ray.client.channel import Dial
from rlmesh_ray.client.greeting import Greeting, greet, greetings_of, understood
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.handshake import Answer
from rlmesh_ray.rpc import grpc
from rlmesh_ray.wire import policy_v1
from rlmesh_ray.wire.policy_v1 import PolicyFacts
from rlmesh_ray.wire.rlmesh_v1 import model as edition_wire
from rlmesh_ray.wire.rlmesh_wire_v1 import model as released_wire

_HANDSHAKE = "/rlmesh.model.v1.ModelService/Handshake"


def shake_hands(dial: Dial) -> Answer:
    """Ask a model endpoint what it is, without opening a session.

    Raises:
        EndpointError: It cannot be reached.
        HandshakeRefusedError: It speaks no generation or edition of this package.
    """
    channel = dial.open()
    try:
        return handshake(dial, channel)[1]
    finally:
        channel.close()


def policy_of(answer: Answer) -> PolicyFacts:
    """Return the facts about the policy in a model endpoint's answer; empty: it has none."""
    return policy_v1.parse(answer.capabilities.get(capabilities.POLICY, ""))


def generations_of(dial: Dial) -> tuple[str, ...]:
    """Return the generations in which a model endpoint can be talked to.

    Raises:
        EndpointError: It cannot be reached.
    """
    channel = dial.open()
    try:
        return understood(dial, channel, _HANDSHAKE, _greetings(dial))
    finally:
        channel.close()


def handshake(dial: Dial, channel: grpc.Channel) -> tuple[str, Answer]:
    """Return the generation to speak on ``channel``, and the answer; raises as ``shake_hands``."""
    greeting, answer = greet(dial, channel, _HANDSHAKE, _greetings(dial))
    return greeting.generation, answer


def _greetings(dial: Dial) -> tuple[Greeting, ...]:
    able = (capabilities.SPACES_CORE, capabilities.POLICY)
    return greetings_of(dial, edition_wire, released_wire, able)
