"""Endpoints against clients that do not keep to the protocol, over raw gRPC."""

import asyncio
import queue
import random
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlmesh_ray import EnvServer, ListenOptions, ModelServer
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import EnvClient
from rlmesh_ray.client.model.remote_model import contract_of
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.loading import as_policy
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.handshake import KNOWN_TEXTS, make_handshake_request
from rlmesh_ray.protocol.messages import (
    ConfigureRoute,
    EnvFailed,
    Predict,
    PredictContext,
    Predicted,
    PredictSlot,
    Render,
    Reset,
    ResetDone,
    Step,
)
from rlmesh_ray.server.endpoint.gate import Drain
from rlmesh_ray.server.endpoint.handshake_service import ServiceOptions
from rlmesh_ray.server.model.batcher import Batcher
from rlmesh_ray.server.model.model_service import ModelService
from rlmesh_ray.server.model.model_stream import MAX_UNANSWERED
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.testing.envs import SPACES, EchoEnv
from rlmesh_ray.wire.rlmesh_v1 import env as wire
from rlmesh_ray.wire.rlmesh_v1 import model as model_wire
from rlmesh_ray.wire.rlmesh_v1 import values
from rlmesh_ray.wire.rlmesh_v1.limits import DEFAULT_MESSAGE_BYTES, max_request_bytes
from tests.loopback.eventually import eventually
from tests.loopback.ports import plain_channel
from tests.loopback.raw_join import MODEL_JOIN, RawJoin

ENV = "/rlmesh.env.v1.EnvService/"
MODEL = "/rlmesh.model.v1.ModelService/"
RESET = wire.pack_request(Reset("1", (1, 2), {"level": [1, {"b": 2}]}, 10_000))


class RawStream:
    """A Join that sends any frames."""

    def __init__(self, address: str, path: str, session_id: str | None = None) -> None:
        options = [("grpc.max_send_message_length", -1)]
        self._channel = plain_channel(address, options=options)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        metadata = session_id and ((capabilities.SESSION_METADATA_KEY, session_id),)
        self._call = self._channel.stream_stream(path)(
            iter(self._outbox.get, None), timeout=30.0, metadata=metadata or None
        )

    def ask(self, frame: bytes) -> bytes:
        self._outbox.put(frame)
        answer: bytes = next(self._call)
        return answer

    def close(self) -> None:
        self._outbox.put(None)
        self._channel.close()


@pytest.fixture(scope="module")
def server() -> Iterator[EnvServer]:
    with EnvServer("CartPole-v1", num_envs=2) as running:
        yield running


def damaged(frame: bytes, chance: random.Random) -> bytes:
    """Return ``frame`` with a few bits flipped, or cut short."""
    data = bytearray(frame)
    for _ in range(chance.randrange(4)):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data[: chance.randrange(len(data) + 1)] if chance.random() < 0.2 else data)


def test_every_malformed_frame_is_answered_in_band(server: EnvServer) -> None:
    chance = random.Random(7)
    frames = [RESET, wire.pack_request(Step("2", bytes(16), 10_000))]
    frames.append(wire.pack_request(Render("3", timeout_ms=10_000)))
    stream = RawStream(server.address, ENV + "Join")
    num_refused = 0

    for _ in range(300):
        answer = wire.parse_response(stream.ask(damaged(chance.choice(frames), chance)))
        if isinstance(answer, EnvFailed):
            num_refused += 1
            if not answer.is_recoverable:
                stream.close()
                stream = RawStream(server.address, ENV + "Join")

    assert num_refused > 100
    assert isinstance(wire.parse_response(stream.ask(RESET)), ResetDone)
    stream.close()


@pytest.mark.parametrize("size", [0, 1, 15, 17, 24])
def test_an_action_of_another_width_is_refused(server: EnvServer, size: int) -> None:
    stream = RawStream(server.address, ENV + "Join")
    stream.ask(RESET)

    answer = wire.parse_response(stream.ask(wire.pack_request(Step("2", bytes(size)))))

    assert isinstance(answer, EnvFailed)
    assert f"{size} bytes, expected 16" in answer.message
    assert not answer.is_recoverable
    stream.close()


@pytest.mark.parametrize("num_lanes", [1, 3])
def test_a_nested_action_of_another_width_is_refused(num_lanes: int) -> None:
    space = SPACES["dict"]
    with EnvServer(lambda: EchoEnv(space), num_envs=2) as server:
        stream = RawStream(server.address, ENV + "Join")
        stream.ask(RESET)
        action = values.encode_batch(
            from_gymnasium(space),
            [
                np.zeros(num_lanes, np.int64),
                np.zeros((num_lanes, 2), np.float32),
                ("",) * num_lanes,
            ],
            num_lanes,
        )

        answer = wire.parse_response(stream.ask(wire.pack_request(Step("2", action))))

        assert isinstance(answer, EnvFailed)
        assert f"the batch has {num_lanes} lanes, expected 2" in answer.message
        stream.close()


def test_a_frame_above_what_the_contract_needs_costs_its_own_session_only(
    server: EnvServer,
) -> None:
    assert server.contract is not None
    limit_bytes = max_request_bytes(server.contract)
    stream, other = (RawStream(server.address, ENV + "Join") for _ in range(2))
    other.ask(RESET)

    largest = wire.parse_response(stream.ask(bytes(limit_bytes)))
    with pytest.raises(grpc.RpcError) as caught:
        stream.ask(bytes(limit_bytes + 1))

    assert limit_bytes < 2 * 2**20
    assert isinstance(largest, EnvFailed)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"({limit_bytes + 1} vs. {limit_bytes})" in str(caught.value.details())
    assert isinstance(wire.parse_response(other.ask(RESET)), ResetDone)
    assert eventually(lambda: server.num_sessions == 1)
    stream.close()
    other.close()


class Large(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Observes 260 times 1 MiB."""

    num_envs = 260
    single_observation_space = gymnasium.spaces.Box(0, 255, (2**20,), np.uint8)
    single_action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def reset(self, **_kwargs: Any) -> Any:
        return np.full((260, 2**20), 7, np.uint8), {}


@pytest.mark.slow
def test_a_batch_above_the_default_limit_arrives_because_the_contract_says_so() -> None:
    with EnvServer(Large) as server:
        client = EnvClient(ConnectOptions(server.address))

        (observation,) = client.reset().observation

        assert isinstance(observation, np.ndarray)
        assert observation.nbytes > DEFAULT_MESSAGE_BYTES
        assert observation[:, -1].tolist() == [7] * 260
        client.close()


@pytest.fixture(scope="module")
def same_step() -> Iterator[EnvServer]:
    def factory() -> gymnasium.vector.VectorEnv[Any, Any, Any]:
        make = [lambda: gymnasium.make("CartPole-v1")] * 2
        return SyncVectorEnv(make, autoreset_mode=AutoresetMode.SAME_STEP)

    with EnvServer(factory) as running:
        yield running


@pytest.mark.parametrize("offered", [None, (), (capabilities.NDARRAY,)])
def test_same_step_is_not_served_to_clients_that_have_not_offered_it(
    same_step: EnvServer, offered: tuple[str, ...] | None
) -> None:
    session_id = None if offered is None else shake_hands(same_step, *offered)
    stream = RawStream(same_step.address, ENV + "Join", session_id)

    with pytest.raises(grpc.RpcError) as caught:
        stream.ask(RESET)

    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "NEXT_STEP or DISABLED" in str(caught.value.details())
    assert eventually(lambda: same_step.num_sessions == 0)
    stream.close()


def test_same_step_is_served_to_clients_that_have_offered_it(same_step: EnvServer) -> None:
    session_id = shake_hands(same_step, capabilities.SAME_STEP)
    stream = RawStream(same_step.address, ENV + "Join", session_id)

    assert isinstance(wire.parse_response(stream.ask(RESET)), ResetDone)
    stream.close()


def test_a_client_of_another_edition_text_is_served_where_the_operator_accepts_it() -> None:
    (name, sha256), *_ = KNOWN_TEXTS.items()
    offer = wire.HANDSHAKE.pack_request(make_handshake_request("peer", "1", {}, text=sha256))
    with (
        EnvServer("CartPole-v1") as strict,
        EnvServer("CartPole-v1", address=ListenOptions(accept_edition_texts=[name])) as lenient,
        ModelServer(zeros) as strict_model,
        ModelServer(zeros, address=ListenOptions(accept_edition_texts=[sha256])) as lenient_model,
    ):
        answers = [
            wire.HANDSHAKE.parse_response(call(server, ENV, offer)).compatible
            for server in (strict, lenient)
        ] + [
            model_wire.HANDSHAKE.parse_response(call(server, MODEL, offer)).compatible
            for server in (strict_model, lenient_model)
        ]

    assert answers == [False, True, False, True]


def test_an_unknown_edition_text_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match="b4"):
        EnvServer("CartPole-v1", address=ListenOptions(accept_edition_texts=["rlmesh-0.1.0b4"]))
    with pytest.raises(ConfigurationError, match="b4"):
        ModelServer(zeros, address=ListenOptions(accept_edition_texts=["rlmesh-0.1.0b4"]))


def call(server: EnvServer | ModelServer, service: str, data: bytes) -> bytes:
    with plain_channel(server.address) as channel:
        reply: bytes = channel.unary_unary(service + "Handshake")(data, timeout=20.0)
        return reply


def shake_hands(server: EnvServer, *offered: str) -> str:
    """Return the session id that a client gets who offers these capabilities."""
    offer = wire.HANDSHAKE.pack_request(
        make_handshake_request("peer", "1", dict.fromkeys(offered, ""))
    )
    return wire.HANDSHAKE.parse_response(call(server, ENV, offer)).capabilities[
        capabilities.SESSION
    ]


@pytest.mark.parametrize("offered", [(), (capabilities.POLICY,)])
def test_what_a_policy_is_is_shown_on_request(offered: tuple[str, ...]) -> None:
    offer = model_wire.HANDSHAKE.pack_request(
        make_handshake_request("peer", "1", dict.fromkeys(offered, ""))
    )
    with ModelServer(zeros) as server:
        answer = model_wire.HANDSHAKE.parse_response(call(server, MODEL, offer))

    assert tuple({capabilities.POLICY} & answer.capabilities.keys()) == offered


@pytest.mark.parametrize("token", ["", "schlüssel", "two\nlines", " space"])
def test_a_token_that_no_call_can_carry_is_refused_at_once(token: str) -> None:
    with pytest.raises(ConfigurationError, match="printable ASCII"):
        EnvServer("CartPole-v1", token=token)


def zeros(observations: Any) -> Any:
    return np.zeros(len(observations), np.int64)


class Audience:
    """The context of a stream, for a service without a network: counts what is written."""

    def __init__(self) -> None:
        self.is_configured = asyncio.Event()
        self.num_answered = 0

    def peer(self) -> str:
        return "nobody"

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def send_initial_metadata(self, _metadata: Any) -> None:
        pass

    async def write(self, _frame: bytes) -> None:
        if self.is_configured.is_set():
            self.num_answered += 1
        self.is_configured.set()


def test_a_client_that_only_sends_is_made_to_wait() -> None:
    go_on = threading.Event()

    def slow(observations: Any) -> Any:
        go_on.wait(20.0)
        return zeros(observations)

    contract = contract_of(gymnasium.make("CartPole-v1"))
    context = PredictContext("", "route", "", (PredictSlot(0, "", 0, False),))
    num_total = 3 * MAX_UNANSWERED
    num_taken = 0

    async def requests() -> AsyncIterator[bytes]:
        nonlocal num_taken
        yield model_wire.pack_request(ConfigureRoute("c", context, contract))
        for number in range(num_total):
            num_taken = number + 1
            yield model_wire.pack_request(Predict(str(number), context, bytes(16)))

    async def converse() -> tuple[int, int]:
        policy, reported = as_policy(slow), Audience()
        host = Batcher(policy, 64)
        service = ModelService(host, ServiceOptions(), Drain())
        serving = asyncio.ensure_future(service.join(requests(), reported))
        await reported.is_configured.wait()  # the route is there, the first Predict is stuck
        for _ in range(10 * num_total):
            await asyncio.sleep(0)
        num_taken_while_stuck = num_taken
        go_on.set()
        await serving
        host.close()
        return num_taken_while_stuck, reported.num_answered

    num_taken_while_stuck, num_answered = asyncio.run(converse())

    assert num_taken_while_stuck <= MAX_UNANSWERED
    # It has half-closed, and gets every answer all the same.
    assert num_answered == num_total
    assert num_taken == num_total


def test_requests_of_one_route_that_come_in_a_flood_are_answered_in_their_order() -> None:
    # At first they queue for the policy's thread, and from the hundredth on, the policy being
    # quick, each may be answered as it comes: none of them in another's place.
    contract = contract_of(gymnasium.make("CartPole-v1"))
    context = PredictContext("", "route", "", (PredictSlot(0, "", 0, False),))
    numbers = [str(number) for number in range(2 * MAX_UNANSWERED)]
    flood = [model_wire.pack_request(Predict(number, context, bytes(16))) for number in numbers]
    opening = model_wire.pack_request(ConfigureRoute("c", context, contract))
    network = torch.nn.Linear(4, 2)

    with (
        ModelServer(network) as server,
        plain_channel(server.address) as channel,
        RawJoin(channel, MODEL_JOIN) as stream,
    ):
        for _ in range(3):  # at last with a policy that has long proved quick
            stream.ask(opening)
            stream.send(flood)
            answers = [stream.receive() for _ in flood]
            reported = [model_wire.parse_response(answer or b"") for answer in answers]
            assert [answer.request_id for answer in reported] == numbers
            assert {type(answer) for answer in reported} == {Predicted}
        assert server.statistics().items == 3 * len(flood)
