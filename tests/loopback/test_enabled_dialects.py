"""What endpoints speak, and what they say to those who speak something else."""

from collections.abc import Iterator
from typing import Any

import grpc
import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlmesh_ray import EnvServer, ModelServer
from rlmesh_ray.dialects.released.protocol import WIRE_V1, make_released_offer
from rlmesh_ray.dialects.released.wire import env as released_env
from rlmesh_ray.dialects.released.wire import model as released_model
from rlmesh_ray.errors import ConfigurationError, EnvStartError
from rlmesh_ray.protocol.capabilities import EDITION_NAME, PROTOCOL_V1
from rlmesh_ray.protocol.handshake import HandshakeResponse, make_handshake_request
from rlmesh_ray.protocol.messages import CloseModel, Configure, EnvFailed, Reset, ResetDone
from rlmesh_ray.wire.rlmesh_v1 import env as edition_env
from rlmesh_ray.wire.rlmesh_v1 import model as edition_model
from rlmesh_ray.wire.rlmesh_v1.handshake import ShutdownResponse
from tests.loopback.ports import plain_channel
from tests.loopback.raw_join import ENV_JOIN, MODEL_JOIN, RawJoin
from tests.loopback.released_join import ReleasedJoin, shake_hands

ENV, MODEL = "/rlmesh.env.v1.EnvService/", "/rlmesh.model.v1.ModelService/"
DM_ENV_RPC = "dm_env_rpc.v1"
DEADLINE_S = 20.0

EDITION_OFFER = make_handshake_request("test", "0", {})
RELEASED_OFFER = make_released_offer("test", "0", {})


def zeros(observations: np.ndarray) -> np.ndarray:
    return np.zeros(len(observations), np.int64)


def tell(address: str, path: str, frame: bytes, token: str | None = None) -> bytes:
    """Return what a call of one frame is answered with."""
    metadata = None if token is None else (("authorization", token),)
    with plain_channel(address) as channel:
        answer: bytes = channel.unary_unary(path)(frame, timeout=DEADLINE_S, metadata=metadata)
        return answer


def greet(address: str, generation: str, service: str) -> HandshakeResponse:
    """Return what a service answers to the handshake of a generation."""
    frames: Any = {
        (PROTOCOL_V1, ENV): edition_env,
        (PROTOCOL_V1, MODEL): edition_model,
        (WIRE_V1, ENV): released_env,
        (WIRE_V1, MODEL): released_model,
    }[generation, service]
    offer = EDITION_OFFER if generation == PROTOCOL_V1 else RELEASED_OFFER
    frame = tell(address, service + "Handshake", frames.HANDSHAKE.pack_request(offer))
    answer: HandshakeResponse = frames.HANDSHAKE.parse_response(frame)
    return answer


def refusal_of_join(address: str, path: str, frame: bytes) -> grpc.RpcError:
    with plain_channel(address) as channel, RawJoin(channel, path) as stream:
        with pytest.raises(grpc.RpcError) as caught:
            stream.ask(frame)
        return caught.value


@pytest.mark.parametrize("service", [ENV, MODEL])
@pytest.mark.parametrize(("spoken", "other"), [(PROTOCOL_V1, WIRE_V1), (WIRE_V1, PROTOCOL_V1)])
def test_a_client_of_another_generation_gets_the_enabled_ones(
    service: str, spoken: str, other: str
) -> None:
    server: EnvServer | ModelServer
    if service == ENV:
        server = EnvServer("CartPole-v1", dialects=[spoken])
    else:
        server = ModelServer(zeros, dialects=[spoken])
    requests = {
        (PROTOCOL_V1, ENV): edition_env.pack_request(Reset("1")),
        (PROTOCOL_V1, MODEL): edition_model.pack_request(CloseModel("1")),
        (WIRE_V1, ENV): released_env.pack_request(Configure("1", EDITION_NAME)),
        (WIRE_V1, MODEL): released_model.pack_request(CloseModel("1")),
    }
    with server:
        welcome = greet(server.address, spoken, service)
        refused = greet(server.address, other, service)
        path = ENV_JOIN if service == ENV else MODEL_JOIN
        error = refusal_of_join(server.address, path, requests[other, service])
        with plain_channel(server.address) as channel:
            call = channel.stream_stream("/dm_env_rpc.v1.Environment/Process")
            with pytest.raises(grpc.RpcError) as third:
                list(call(iter([b""]), timeout=DEADLINE_S))

    says = f"this endpoint does not speak {other}, only {spoken}"
    assert (welcome.compatible, refused.compatible) == (True, False)
    assert refused.contract is None
    assert refused.error_message.startswith(says)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert error.details().startswith(says)
    assert third.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_an_endpoint_may_speak_only_dm_env_rpc() -> None:
    with EnvServer("CartPole-v1", dialects=[DM_ENV_RPC]) as server:
        refused = [greet(server.address, each, ENV) for each in (PROTOCOL_V1, WIRE_V1)]
        with plain_channel(server.address) as channel:
            call = channel.stream_stream("/dm_env_rpc.v1.Environment/Process")
            answers = list(call(iter([b""]), timeout=DEADLINE_S))

    assert not any(answer.compatible for answer in refused)
    assert all("only dm_env_rpc.v1" in answer.error_message for answer in refused)
    assert len(answers) == 1


@pytest.mark.parametrize("frames", [edition_env, released_env])
@pytest.mark.parametrize("is_allowed", [False, True])
def test_a_shutdown_is_answered_in_the_form_it_came_in(frames: Any, is_allowed: bool) -> None:
    with ModelServer(zeros, allow_shutdown=is_allowed) as server:
        request = frames.HANDSHAKE.pack_shutdown_request("the day is over")
        answer = frames.HANDSHAKE.parse_shutdown_response(
            tell(server.address, MODEL + "Shutdown", request)
        )

        assert server.wait(DEADLINE_S if is_allowed else 0.0) == is_allowed

    assert isinstance(answer, ShutdownResponse)
    assert answer.accepted == is_allowed
    assert ("allow_shutdown" in answer.message) != is_allowed


def test_no_client_stops_an_endpoint_in_a_dialect_that_is_not_enabled() -> None:
    with ModelServer(zeros, allow_shutdown=True, dialects=[PROTOCOL_V1]) as server:
        request = released_env.HANDSHAKE.pack_shutdown_request("the day is over")
        frame = tell(server.address, MODEL + "Shutdown", request)

        assert not server.wait(0.0)

    answer = released_env.HANDSHAKE.parse_shutdown_response(frame)
    assert not answer.accepted
    assert answer.message.startswith(f"this endpoint does not speak {WIRE_V1}")


def test_lanes_that_reset_within_a_step_are_refused_to_clients_that_do_not_know_it() -> None:
    def make() -> SyncVectorEnv:
        envs = [lambda: gymnasium.make("CartPole-v1")] * 2
        return SyncVectorEnv(envs, autoreset_mode=AutoresetMode.SAME_STEP)

    with EnvServer(make) as server:
        answer = shake_hands(server.address)
        configure = released_env.pack_request(Configure("1", EDITION_NAME))
        error = refusal_of_join(server.address, ENV_JOIN, configure)

    assert not answer.compatible
    assert "SAME_STEP" in answer.error_message
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "SAME_STEP" in error.details()


@pytest.fixture(scope="module")
def pole() -> Iterator[EnvServer]:
    with EnvServer("CartPole-v1") as server:
        yield server


def test_a_handshake_that_makes_no_sense_is_refused(pole: EnvServer) -> None:
    for frame in (b"\x0a\x02\x0a\x05", b"\xff"):
        with pytest.raises(grpc.RpcError) as caught:
            tell(pole.address, ENV + "Handshake", frame)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_token_may_be_shown_alone() -> None:
    with EnvServer("CartPole-v1", token="s3cret") as server:
        alone = shake_hands(server.address, "s3cret")
        bearer_value = shake_hands(server.address, "Bearer s3cret")
        for wrong in (None, "", "s3cre", "s3cret ", "bearer s3cret", "Bearer", "Bearer s3cre"):
            with pytest.raises(grpc.RpcError) as caught:
                shake_hands(server.address, wrong)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

    assert alone.compatible
    assert bearer_value.compatible


def test_strangers_of_both_generations_are_known_by_what_they_say_first(pole: EnvServer) -> None:
    with plain_channel(pole.address) as channel:
        with RawJoin(channel, ENV_JOIN) as edition:
            reset = edition_env.parse_response(edition.ask(edition_env.pack_request(Reset("a"))))
            # It goes on as it has begun.
            odd = edition.ask(released_env.pack_request(Configure("b", EDITION_NAME)))
        with ReleasedJoin(pole.address, configure=False) as released:
            fresh = released.ask(Reset("c"))

    assert isinstance(reset, ResetDone)
    assert reset.episode_ids != ("",)
    assert isinstance(edition_env.parse_response(odd), EnvFailed)
    assert isinstance(fresh, ResetDone)


def test_wrong_options_are_refused_with_the_choices() -> None:
    both = f"{PROTOCOL_V1}, {WIRE_V1}"
    for dialects, words in [
        (["latin"], rf"'latin', which is not one of {both}, {DM_ENV_RPC}"),
        ([], f"names nothing; name one or more of {both}"),
        (WIRE_V1, rf"must be several names: \('{WIRE_V1}',\)"),
    ]:
        with pytest.raises(ConfigurationError, match=words):
            EnvServer("CartPole-v1", dialects=dialects)
    with pytest.raises(ConfigurationError, match=f"'{DM_ENV_RPC}', which is not one of {both}$"):
        ModelServer(zeros, dialects=[DM_ENV_RPC])
    with pytest.raises(ConfigurationError, match="'same_step' is not one of next_step, disabled"):
        EnvServer("CartPole-v1", autoreset="same_step")


def test_a_vector_that_resets_itself_has_no_other_mode() -> None:
    def make() -> SyncVectorEnv:
        return SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)

    with pytest.raises(EnvStartError, match="autoreset was to be disabled"):
        EnvServer(make, autoreset="disabled").start()
