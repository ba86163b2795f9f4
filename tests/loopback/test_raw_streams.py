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

from rlmesh_ray import EnvServer, ModelServer
from rlmesh_ray.client.remote_model import contract_of
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.loading import as_policy
from rlmesh_ray.protocol.messages import (
    ConfigureRoute,
    EnvFailed,
    Predict,
    PredictContext,
    PredictSlot,
    Render,
    Reset,
    ResetDone,
    Step,
)
from rlmesh_ray.server.model_host import ModelHost
from rlmesh_ray.server.model_service import MAX_UNANSWERED, ModelService
from rlmesh_ray.wire.rlmesh_v1 import env as wire
from rlmesh_ray.wire.rlmesh_v1 import model as model_wire

ENV = "/rlmesh.env.v1.EnvService/"
MODEL = "/rlmesh.model.v1.ModelService/"
RESET = wire.pack_request(Reset("1", (1, 2), {"level": [1, {"b": 2}]}, 10_000))


class RawStream:
    """A Join that sends whatever it is told to."""

    def __init__(self, address: str, path: str) -> None:
        options = [("grpc.max_send_message_length", -1)]
        self._channel = grpc.insecure_channel(address, options=options)
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call = self._channel.stream_stream(path)(iter(self._outbox.get, None), timeout=30.0)

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


def test_a_frame_above_the_limit_costs_its_own_session_only(server: EnvServer) -> None:
    stream, other = (RawStream(server.address, ENV + "Join") for _ in range(2))
    other.ask(RESET)

    with pytest.raises(grpc.RpcError) as caught:
        stream.ask(bytes(256 * 1024 * 1024 + 1))

    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert isinstance(wire.parse_response(other.ask(RESET)), ResetDone)
    stream.close()
    other.close()


@pytest.mark.parametrize("metadata", [None, (("authorization", "Bearer wron"),)])
@pytest.mark.parametrize("method", ["Handshake", "Shutdown", "Join", "NoSuchMethod"])
@pytest.mark.parametrize("service", [ENV, MODEL])
def test_no_call_goes_without_the_token(
    closed_servers: dict[str, Any], service: str, method: str, metadata: Any
) -> None:
    with grpc.insecure_channel(closed_servers[service].address) as channel:
        if method == "Join":
            call = channel.stream_stream(service + method)
            answers = call(iter([RESET]), metadata=metadata, timeout=10.0)
        else:
            call = channel.unary_stream(service + method)
            answers = call(b"", metadata=metadata, timeout=10.0)
        with pytest.raises(grpc.RpcError) as caught:
            next(answers)

    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert closed_servers[ENV].num_sessions == 0


@pytest.fixture(scope="module")
def closed_servers() -> Iterator[dict[str, Any]]:
    with EnvServer("CartPole-v1", token="wrong") as env, ModelServer(zeros, token="wrong") as model:
        yield {ENV: env, MODEL: model}


@pytest.mark.parametrize("token", ["", "schlüssel", "two\nlines", " space"])
def test_a_token_that_no_call_can_carry_is_refused_at_once(token: str) -> None:
    with pytest.raises(ConfigurationError, match="printable ASCII"):
        EnvServer("CartPole-v1", token=token)


def zeros(observations: Any) -> Any:
    return np.zeros(len(observations), np.int64)


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

    class Context:
        async def send_initial_metadata(self, _metadata: Any) -> None:
            pass

    async def converse() -> tuple[int, int]:
        host = ModelHost(as_policy(slow), 64)
        answers = ModelService(host).join(requests(), Context())
        await anext(answers)  # the route is there, the first Predict is stuck
        for _ in range(10 * num_total):
            await asyncio.sleep(0)
        num_taken_while_stuck = num_taken
        go_on.set()
        num_answered = 0
        async for _ in answers:
            num_answered += 1
        host.close()
        return num_taken_while_stuck, num_answered

    num_taken_while_stuck, num_answered = asyncio.run(converse())

    assert num_taken_while_stuck <= MAX_UNANSWERED
    assert num_answered > MAX_UNANSWERED
    assert num_taken == num_total
