"""Our clients speak the released generation where an endpoint knows no other.

The endpoints are ours, with one dialect enabled, and scripted ones that refuse. With the
released package itself: tests/peers/test_our_clients_on_released_servers.py.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import grpc
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray import EnvServer, ModelServer, RemoteEnv, RemoteModel, RemoteVectorEnv, evaluate
from rlmesh_ray.cli.commands.inspect import dialects_of_env
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import EnvClient, shake_hands
from rlmesh_ray.client.model.remote_model import Slots, generations_of
from rlmesh_ray.client.model.remote_model import shake_hands as shake_hands_with_model
from rlmesh_ray.dialects.released.protocol import (
    WIRE_V1,
    answer_released_offer,
    make_released_offer,
)
from rlmesh_ray.dialects.released.wire import env as released_wire
from rlmesh_ray.dialects.released.wire import values
from rlmesh_ray.errors import (
    ConfigurationError,
    EndpointLostError,
    EndpointTimeoutError,
    HandshakeRefusedError,
    RemoteEnvError,
    RemoteProtocolError,
)
from rlmesh_ray.protocol.capabilities import PROTOCOL_V1
from rlmesh_ray.protocol.handshake import HandshakeResponse
from rlmesh_ray.protocol.messages import (
    Configure,
    Configured,
    EnvErrorCode,
    EnvFailed,
    MalformedRequest,
    Reset,
    ResetDone,
    StepDone,
)
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.testing.equality import assert_identical
from rlmesh_ray.wire.rlmesh_v1 import env as edition_wire
from tests.peers.rlmesh_b3 import world
from tests.peers.rlmesh_b3.world import World

DM_ENV_RPC = "dm_env_rpc.v1"
CONTRACT = EnvContract(
    "Test",
    from_gymnasium(spaces.Discrete(9)),
    from_gymnasium(spaces.Discrete(2)),
    1,
    AutoresetMode.DISABLED,
)


# --- the same for all clients ----------------------------------------------------------------


def test_a_single_environment_is_the_same_in_both_generations() -> None:
    traces = []
    for generation in (PROTOCOL_V1, WIRE_V1):
        with EnvServer(World, dialects=[generation]) as server:
            remote = RemoteEnv(server.address)
            actions = world.actions(5, 7)
            space = remote.observation_space
            traces.append(world.play(remote, space, actions, seed=3, options={"steps": 1}))
            traces[-1].append(np.asarray(remote.render()).tolist())
            remote.close()

    assert traces[0] == traces[1]
    assert sum(len(entry) == 2 for entry in traces[0]) >= 3, "episodes must end on the way"


@pytest.mark.parametrize(
    "autoreset", [pytest.param("next_step", marks=pytest.mark.slow), "disabled"]
)
def test_lanes_are_the_same_in_both_generations(autoreset: str) -> None:
    traces = []
    for generation in (PROTOCOL_V1, WIRE_V1):
        with EnvServer(World, num_envs=3, autoreset=autoreset, dialects=[generation]) as server:
            remote = RemoteVectorEnv(server.address)
            traces.append(list(_lane_traces(remote)))
            remote.close()

    assert_identical(traces[1], traces[0])
    assert any(entry[2].any() or entry[3].any() for entry in traces[0] if len(entry) == 5)


def _lane_traces(remote: RemoteVectorEnv) -> Iterator[Any]:
    """Step three lanes of World, and reset those that have ended where they do not do it."""
    is_disabled = remote.metadata["autoreset_mode"] is gymnasium.vector.AutoresetMode.DISABLED
    yield remote.reset(seed=3, options={"steps": 1})
    for batch in world.batches(3, 7):
        *reported, terminated, truncated, infos = remote.step(batch)
        yield (*reported, terminated, truncated, infos)
        ended = terminated | truncated
        if is_disabled and ended.any():
            yield remote.reset(seed=7, options={"reset_mask": ended})


@pytest.mark.parametrize(
    "autoreset", ["next_step", pytest.param("disabled", marks=pytest.mark.slow)]
)
def test_episodes_are_counted_alike_in_both_generations(autoreset: str) -> None:
    accounts = []
    for generation in (PROTOCOL_V1, WIRE_V1):
        with EnvServer(
            "CartPole-v1", num_envs=2, autoreset=autoreset, dialects=[generation]
        ) as server:
            client = EnvClient(ConnectOptions(server.address), transport="grpc")
            accounts.append(list(_account(client)))
            client.close()

    assert accounts[0] == accounts[1]
    assert sum(len(episodes) for _, episodes in accounts[0]) >= 2


def _account(client: EnvClient) -> Iterator[tuple[list[bool], list[Any]]]:
    client.reset(seeds=[3, 4])
    for step in range(40):
        result = client.step([np.array([1, step % 2])])
        yield (
            [name != "" for name in result.episode_ids],
            [
                (each.env_index, each.seed, each.step_count, each.cumulative_reward)
                for each in result.completed_episodes
            ],
        )
        if step == 20:
            client.reset()
        elif client.contract.autoreset_mode is AutoresetMode.DISABLED and "" in result.episode_ids:
            client.reset(lanes=[lane for lane, name in enumerate(result.episode_ids) if not name])


def _first_above_two(rows: Any) -> Any:
    return (rows[:, 0] > 2).astype(np.int64)


def test_models_act_alike_in_both_generations() -> None:
    reported = []
    env = gymnasium.make_vec("CartPole-v1", 2)
    observations = np.arange(8, dtype=np.float32).reshape(2, 4)
    for generation in (PROTOCOL_V1, WIRE_V1):
        with (
            ModelServer(
                lambda rows: (rows[:, 0] > 2).astype(np.int64), dialects=[generation]
            ) as server,
            RemoteModel(server.address) as model,
        ):
            model.configure_route(env)
            reported.append([model.predict(observations).tolist()])
            for step, reset in enumerate([True, False, True]):
                slots = Slots([0, 1], ["a", "b"], [step] * 2, [reset] * 2)
                reported[-1].append(model.predict(observations, slots=slots).tolist())
            telemetry = model.last_telemetry()
            model.close_route()

    assert reported[0] == reported[1] == [[0, 1]] * 4
    assert telemetry is not None
    assert telemetry.forward_s > 0


@pytest.mark.slow
def test_both_are_evaluated_together() -> None:
    def balance(rows: Any) -> Any:
        return (rows[:, 2] + rows[:, 3] > 0).astype(np.int64)

    with (
        EnvServer("CartPole-v1", dialects=[PROTOCOL_V1]) as one,
        EnvServer("CartPole-v1", num_envs=2, autoreset="disabled", dialects=[WIRE_V1]) as other,
        ModelServer(balance, dialects=[PROTOCOL_V1]) as model,
        ModelServer(balance, dialects=[WIRE_V1]) as other_model,
    ):
        envs, models = [one.address, other.address], [model.address, other_model.address]
        result = evaluate(envs, models, episodes=4, seed=1)
        alone = evaluate(one.address, balance, episodes=4, seed=1)

    assert [e.episode_return for e in result.episodes] == [e.episode_return for e in alone.episodes]


# --- who speaks what ---------------------------------------------------------------------------


def test_what_an_environments_endpoint_speaks_is_seen_from_outside() -> None:
    with EnvServer("CartPole-v1", dialects=[DM_ENV_RPC, WIRE_V1]) as server:
        connect_options = ConnectOptions(server.address)
        assert shake_hands(connect_options).generation == WIRE_V1
        assert dialects_of_env(connect_options) == (WIRE_V1, DM_ENV_RPC)
        with pytest.raises(ConfigurationError, match="leave out edition_text"):
            EnvClient(ConnectOptions(server.address, edition_text="rlmesh-0.1.0b3"))


@pytest.mark.parametrize("dialects", [[PROTOCOL_V1], [WIRE_V1], [PROTOCOL_V1, WIRE_V1]])
def test_what_a_models_endpoint_speaks_is_seen_from_outside(dialects: list[str]) -> None:
    with ModelServer(lambda rows: rows, dialects=dialects) as server:
        answer = shake_hands_with_model(ConnectOptions(server.address))
        found = generations_of(ConnectOptions(server.address))

    assert found == tuple(dialects)
    assert answer.generation == found[0]


def test_an_endpoint_that_speaks_neither_says_so() -> None:
    with (
        EnvServer("CartPole-v1", dialects=[DM_ENV_RPC]) as server,
        pytest.raises(HandshakeRefusedError, match=DM_ENV_RPC),
    ):
        RemoteEnv(server.address)


# --- scripted endpoints ------------------------------------------------------------------------

Reply: TypeAlias = bytes | grpc.StatusCode
Ask: TypeAlias = Callable[[bytes], Reply]


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Serve a handshake, and a Join that answers each frame; return the address."""
    servers = []

    def start(handshake: Ask, join: Callable[[bytes], bytes | None] = lambda _: b"") -> str:
        def answer(data: bytes, context: grpc.ServicerContext) -> bytes:
            reply = handshake(data)
            if isinstance(reply, grpc.StatusCode):
                context.abort(reply, f"no sense ({reply.name})")
            return reply

        def converse(frames: Iterator[bytes], _context: object) -> Iterator[bytes]:
            return (reply for reply in map(join, frames) if reply is not None)

        server = grpc.server(ThreadPoolExecutor(2))
        handlers = {
            "Handshake": grpc.unary_unary_rpc_method_handler(answer),
            "Join": grpc.stream_stream_rpc_method_handler(converse),
        }
        name = "rlmesh.env.v1.EnvService"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(None).wait()


def is_edition(data: bytes) -> bool:
    return data.startswith(b"\x0a\x12rlmesh.protocol.v1")


def replies(edition: Reply, released: Reply) -> Ask:
    return lambda data: edition if is_edition(data) else released


OFFER = make_released_offer("test", "0", {})
REFUSED = released_wire.HANDSHAKE.pack_response(
    answer_released_offer(
        OFFER, server_version="9.9", capabilities={}, refusal="come back tomorrow"
    )
)
ACCEPTED = released_wire.HANDSHAKE.pack_response(
    answer_released_offer(OFFER, server_version="9.9", capabilities={}, contract=CONTRACT)
)


@pytest.mark.parametrize("first", ["INTERNAL", "INVALID_ARGUMENT", "UNKNOWN"])
def test_what_does_not_understand_the_edition_is_asked_in_the_other_generation(
    first: str, serve: Callable[..., str]
) -> None:
    address = serve(replies(grpc.StatusCode[first], ACCEPTED))

    answer = shake_hands(ConnectOptions(address))

    assert (answer.generation, answer.server_version) == (WIRE_V1, "9.9")
    assert dialects_of_env(ConnectOptions(address)) == (WIRE_V1,)


@pytest.mark.parametrize("first", [b"", ACCEPTED, REFUSED])
def test_an_answer_in_another_generation_s_form_is_no_refusal(
    first: bytes, serve: Callable[..., str]
) -> None:
    address = serve(replies(first, ACCEPTED))

    assert shake_hands(ConnectOptions(address)).generation == WIRE_V1
    assert dialects_of_env(ConnectOptions(address)) == (WIRE_V1,)


def test_an_answer_without_a_name_is_not_shown_as_one(serve: Callable[..., str]) -> None:
    with pytest.raises(HandshakeRefusedError, match="without a generation and without a reason"):
        EnvClient(ConnectOptions(serve(replies(ACCEPTED, grpc.StatusCode.INTERNAL))))


def test_who_never_answers_the_second_question_is_given_up(serve: Callable[..., str]) -> None:
    is_over = threading.Event()

    def handshake(data: bytes) -> Reply:
        if not is_edition(data):
            is_over.wait()
        return grpc.StatusCode.INTERNAL

    address = serve(handshake)
    try:
        with pytest.raises(EndpointTimeoutError):
            EnvClient(ConnectOptions(address, timeout_s=0.3))
    finally:
        is_over.set()


def test_who_never_settles_the_edition_is_given_up(serve: Callable[..., str]) -> None:
    address = serve(replies(grpc.StatusCode.INTERNAL, ACCEPTED), lambda _: None)

    with pytest.raises(EndpointTimeoutError):
        EnvClient(ConnectOptions(address, timeout_s=0.3))


@pytest.mark.parametrize("first", [grpc.StatusCode.INTERNAL, b"\xff\xff"])
def test_who_understands_only_the_second_question_says_why_not(
    first: Reply, serve: Callable[..., str]
) -> None:
    with pytest.raises(HandshakeRefusedError, match="come back tomorrow"):
        EnvClient(ConnectOptions(serve(replies(first, REFUSED))))


def test_a_client_of_neither_dialect_gets_the_reason_with_the_first_answer(
    serve: Callable[..., str],
) -> None:
    odd = grpc.StatusCode.INVALID_ARGUMENT

    with pytest.raises(EndpointLostError, match=r"INTERNAL: no sense \(INTERNAL\)"):
        EnvClient(ConnectOptions(serve(replies(grpc.StatusCode.INTERNAL, odd))))
    with pytest.raises(HandshakeRefusedError, match="is malformed"):
        EnvClient(ConnectOptions(serve(replies(b"\xff\xff", b"\xff\xff"))))


def test_a_refusal_in_the_edition_is_the_last_word(serve: Callable[..., str]) -> None:
    asked: list[bool] = []

    def handshake(data: bytes) -> Reply:
        asked.append(is_edition(data))
        answer = HandshakeResponse(
            False, PROTOCOL_V1, PROTOCOL_V1, "9", (), error_message="not with you"
        )
        return edition_wire.HANDSHAKE.pack_response(answer)

    with pytest.raises(HandshakeRefusedError, match="not with you"):
        EnvClient(ConnectOptions(serve(handshake)))

    assert asked == [True]


def test_another_edition_of_the_released_generation_is_refused(serve: Callable[..., str]) -> None:
    other = HandshakeResponse(True, WIRE_V1, WIRE_V1, "9.9", ("2031.01",), contract=CONTRACT)

    with pytest.raises(HandshakeRefusedError, match=r"editions 2031\.01"):
        EnvClient(
            ConnectOptions(
                serve(
                    replies(grpc.StatusCode.INTERNAL, released_wire.HANDSHAKE.pack_response(other))
                )
            )
        )


def test_nothing_is_asked_before_the_edition_is_settled(serve: Callable[..., str]) -> None:
    asked: list[object] = []

    def join(data: bytes) -> bytes:
        request = released_wire.parse_request(data)
        asked.append(request)
        assert not isinstance(request, MalformedRequest)
        failure = EnvFailed(request.request_id, EnvErrorCode.INVALID_ACTION, "not that one", False)
        return released_wire.pack_response(failure)

    address = serve(replies(grpc.StatusCode.INTERNAL, ACCEPTED), join)
    with pytest.raises(HandshakeRefusedError, match="INVALID_ACTION: not that one") as caught:
        EnvClient(ConnectOptions(address))

    assert isinstance(caught.value.__cause__, RemoteEnvError)
    assert isinstance(asked[0], Configure)
    assert asked[0].edition == "2026.06"


@pytest.mark.parametrize(
    ("has_leaves", "words"), [(True, "1 and 0 flags for 1 lanes"), (False, "has 0 leaves")]
)
def test_an_answer_that_makes_no_sense_ends_the_session(
    has_leaves: bool, words: str, serve: Callable[..., str]
) -> None:
    def join(data: bytes) -> bytes:
        request = released_wire.parse_request(data)
        if isinstance(request, Configure):
            return released_wire.pack_response(Configured(request.request_id))
        first = values.encode_batch(CONTRACT.observation_space, [np.array([1])], 1)
        if isinstance(request, Reset):
            return released_wire.pack_response(ResetDone(request.request_id, first, {}, ()))
        flag = b"" if has_leaves else b"\0"
        observation = first if has_leaves else b""
        done = StepDone(request.request_id, observation, [1.0], b"\0", flag, {}, (), ())
        return released_wire.pack_response(done)

    client = EnvClient(ConnectOptions(serve(replies(grpc.StatusCode.INTERNAL, ACCEPTED), join)))
    first = client.reset()
    with pytest.raises(RemoteProtocolError, match=words):
        client.step([np.array([0])])
    with pytest.raises(EndpointLostError, match="open a new one"):
        client.reset()
    client.close()

    np.testing.assert_array_equal(first.observation[0], [1])
