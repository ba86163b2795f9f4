"""How our clients open sessions and when they give them up, against a scripted server.

Edition 2026.06, "Session Establishment" and "Timeouts and Errors".
"""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray import EnvServer, RemoteEnv, RemoteModel, RemoteVectorEnv
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import EnvClient, shake_hands
from rlmesh_ray.errors import (
    ConfigurationError,
    EndpointLostError,
    HandshakeRefusedError,
    RemoteEnvError,
    RemoteModelError,
    RemoteProtocolError,
)
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.handshake import (
    EDITION_2026_06,
    GENERATION,
    KNOWN_TEXTS,
    HandshakeRequest,
    HandshakeResponse,
)
from rlmesh_ray.protocol.messages import (
    Close,
    Closed,
    CloseModel,
    ConfigureRoute,
    EnvErrorCode,
    EnvFailed,
    EpisodeRecord,
    ModelClosed,
    ModelErrorCode,
    ModelFailed,
    Predict,
    Predicted,
    Request,
    Reset,
    ResetDone,
    Response,
    RouteConfigured,
    Step,
    StepDone,
)
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.spec import DiscreteSpec
from rlmesh_ray.spaces.vector_infos import lane_info
from rlmesh_ray.wire._pb.rlmesh.env.v1 import service_pb2
from rlmesh_ray.wire.rlmesh_v1 import env as env_wire
from rlmesh_ray.wire.rlmesh_v1 import model as model_wire

CONTRACT = EnvContract("Test", DiscreteSpec(9), DiscreteSpec(2), 1, AutoresetMode.DISABLED)
YES = HandshakeResponse(
    compatible=True,
    generation=GENERATION,
    min_generation=GENERATION,
    server_version="9",
    editions=("2026.06",),
    selected_edition="2026.06",
    spec_sha256=EDITION_2026_06.spec_sha256,
    status="provisional",
    contract=CONTRACT,
)
NO = HandshakeResponse(
    False, GENERATION, GENERATION, "9", ("2031.01",), error_message="not with you"
)
FATAL = EnvFailed("", EnvErrorCode.INVALID_ACTION, "no such action", is_recoverable=False)

Behaviour = Callable[[Any], Response]


class Peer:
    """A server with scripted answers that remembers its requests.

    Args:
        wire: ``env_wire`` or ``model_wire``.
        answer: To every handshake; an Answer or raw bytes.
        behave: Makes the response to each request; the request's id is put in.
    """

    def __init__(self, wire: Any, answer: HandshakeResponse | bytes, behave: Behaviour) -> None:
        self.offers: list[HandshakeRequest] = []
        self.join_metadata: list[dict[str, str]] = []
        self.requests: list[Any] = []
        self.has_ended = threading.Event()
        self._wire, self._answer, self._behave = wire, answer, behave
        service = "env.v1.EnvService" if wire is env_wire else "model.v1.ModelService"
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        handlers = {
            "Handshake": grpc.unary_unary_rpc_method_handler(self._handshake),
            "Join": grpc.stream_stream_rpc_method_handler(self._join),
        }
        generic = grpc.method_handlers_generic_handler(f"rlmesh.{service}", handlers)
        self._server.add_generic_rpc_handlers((generic,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait(10)

    def _handshake(self, data: bytes, _context: grpc.ServicerContext) -> bytes:
        self.offers.append(self._wire.HANDSHAKE.parse_request(data))
        answer = self._answer
        packed: bytes = (
            answer if isinstance(answer, bytes) else self._wire.HANDSHAKE.pack_response(answer)
        )
        return packed

    def _join(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        self.join_metadata.append(dict(context.invocation_metadata()))
        context.add_callback(self.has_ended.set)
        for frame in frames:
            request: Request = self._wire.parse_request(frame)
            self.requests.append(request)
            response = self._behave(request)
            response = dataclasses.replace(
                response, request_id=response.request_id or request.request_id
            )
            if self._wire is env_wire:
                yield env_wire.pack_response(response, tag_arrays=False)  # type: ignore[arg-type]
            else:
                yield model_wire.pack_response(response)  # type: ignore[arg-type]


def obey(request: Any) -> Response:
    """Answer as a well-behaved environment, or model, does."""
    observation = np.array([4], np.int64).tobytes()
    match request:
        case Reset():
            return ResetDone("", observation, {}, ("e",))
        case Step():
            return StepDone("", observation, [1.0], b"\0", b"\0", {}, (), ("e",))
        case Close():
            return Closed("")
        case ConfigureRoute():
            return RouteConfigured("")
        case Predict():
            return Predicted("", request.context, observation)
        case CloseModel():
            return ModelClosed("")
    raise AssertionError(request)


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    started: list[Peer] = []

    def start(
        answer: HandshakeResponse | bytes = YES, behave: Behaviour = obey, wire: Any = env_wire
    ) -> Peer:
        started.append(Peer(wire, answer, behave))
        return started[-1]

    yield start
    for one in started:
        one.stop()


ACTION = [np.array([1], np.int64)]

# --- the handshake -----------------------------------------------------------------------


def test_what_stands_in_a_refusal_besides_the_reason_is_not_looked_at(
    peer: Callable[..., Peer],
) -> None:
    message = service_pb2.HandshakeResponse(error_message="not with you")
    message.env_contract.num_envs = 3  # spaces that make no sense

    server = peer(message.SerializeToString())

    with pytest.raises(HandshakeRefusedError, match="not with you"):
        EnvClient(ConnectOptions(server.address))


def test_a_compatible_answer_without_a_contract_is_refused_clearly(
    peer: Callable[..., Peer],
) -> None:
    server = peer(dataclasses.replace(YES, contract=None))

    with pytest.raises(HandshakeRefusedError, match="without an environment contract"):
        EnvClient(ConnectOptions(server.address))

    assert server.join_metadata == []


def _contract(**changes: Any) -> bytes:
    message = service_pb2.HandshakeResponse.FromString(env_wire.HANDSHAKE.pack_response(YES))
    for name, value in changes.items():
        if value is None:
            message.env_contract.ClearField(name)
        else:
            setattr(message.env_contract, name, value)
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (_contract(num_envs=0), "has 0 lanes"),
        (_contract(num_envs=2**32 - 1), "do not fit into a message"),
        (_contract(autoreset_mode=77), "autoreset mode 77"),
        (_contract(observation_space=None), "observation space"),
        (_contract(action_space=None), "action space"),
        (b"\xff\xff", "is malformed"),
    ],
)
def test_a_contract_that_makes_no_sense_is_refused_before_a_stream_is_opened(
    peer: Callable[..., Peer], answer: bytes, reason: str
) -> None:
    server = peer(answer)

    with pytest.raises(HandshakeRefusedError, match=reason):
        EnvClient(ConnectOptions(server.address))

    assert server.join_metadata == []


def test_the_stream_carries_the_session_id_that_the_handshake_gave(
    peer: Callable[..., Peer],
) -> None:
    server = peer(dataclasses.replace(YES, capabilities={capabilities.SESSION: "id-7"}))

    client = EnvClient(ConnectOptions(server.address))
    client.reset()
    client.close()

    assert server.join_metadata[0][capabilities.SESSION_METADATA_KEY] == "id-7"


@pytest.mark.parametrize("reported", [{}, {"org.example.quantum.v9": "yes", "": "\n"}])
def test_capabilities_that_are_absent_or_unknown_change_nothing(
    peer: Callable[..., Peer], reported: dict[str, str]
) -> None:
    server = peer(dataclasses.replace(YES, capabilities=reported))

    client = EnvClient(ConnectOptions(server.address))
    client.reset()
    result = client.step(ACTION)
    client.close()

    assert result.rewards.tolist() == [1.0]
    assert capabilities.SESSION_METADATA_KEY not in server.join_metadata[0]


def test_single_lanes_are_reset_only_where_the_server_offers_it(
    peer: Callable[..., Peer],
) -> None:
    two = dataclasses.replace(CONTRACT, num_envs=2)
    plain = dataclasses.replace(YES, contract=two)
    able = dataclasses.replace(plain, capabilities={capabilities.PARTIAL_RESET: ""})
    sent = []
    for answer in (plain, able):
        server = peer(answer)
        client = EnvClient(ConnectOptions(server.address))
        client.send_reset(lanes=[0, 1], seeds=[5, 6])
        if answer is plain:
            with pytest.raises(ConfigurationError, match="resets all of its 2 lanes or none"):
                client.send_reset(lanes=[1])
        else:
            client.send_reset(lanes=[1])
        client.close()
        sent.append([r.env_indices for r in server.requests if isinstance(r, Reset)])

    assert sent == [[()], [(), (1,)]]


def test_the_text_that_the_user_names_is_presented_and_accepted_back(
    peer: Callable[..., Peer],
) -> None:
    text = KNOWN_TEXTS["rlmesh-0.1.0b3"]
    server = peer(dataclasses.replace(YES, spec_sha256=text))

    answer = shake_hands(ConnectOptions(server.address, edition_text="rlmesh-0.1.0b3"))

    assert answer.compatible
    assert server.offers[0].spec_sha256 == text
    with pytest.raises(HandshakeRefusedError, match=r"edition_text='rlmesh-0\.1\.0b3'"):
        shake_hands(ConnectOptions(server.address))
    assert server.offers[1].spec_sha256 == EDITION_2026_06.spec_sha256


@pytest.mark.parametrize("client", [ConnectOptions, RemoteModel])
def test_an_unknown_edition_text_is_refused_before_anything_is_dialed(
    client: Callable[..., object],
) -> None:
    with pytest.raises(ConfigurationError, match=r"rlmesh-0\.1\.0b3, or the text's sha256"):
        client("127.0.0.1:1", edition_text="rlmesh-9")


# --- errors ------------------------------------------------------------------------------


def fails_on_step(failure: EnvFailed) -> Behaviour:
    return lambda request: failure if isinstance(request, Step) else obey(request)


def test_a_recoverable_error_leaves_the_session_usable(peer: Callable[..., Peer]) -> None:
    failure = dataclasses.replace(FATAL, is_recoverable=True)
    server = peer(behave=fails_on_step(failure))
    client = EnvClient(ConnectOptions(server.address))
    client.reset()
    with pytest.raises(RemoteEnvError):
        client.step(ACTION)

    assert client.reset().episode_ids == ("e",)
    client.close()


def test_a_fatal_error_ends_what_was_sent_before_it_arrived(peer: Callable[..., Peer]) -> None:
    client = EnvClient(ConnectOptions(peer(behave=fails_on_step(FATAL)).address))
    client.reset()
    step, reset = client.send_step(ACTION), client.send_reset()

    with pytest.raises(RemoteEnvError):
        client.receive_step(step)

    with pytest.raises(EndpointLostError, match="no such action"):
        client.receive_reset(reset)
    with pytest.raises(EndpointLostError):
        client.send_reset()
    client.close()


def test_close_waits_for_its_own_answer_behind_those_that_were_not_awaited(
    peer: Callable[..., Peer],
) -> None:
    def behave(request: Any) -> Response:
        if len(server.requests) == 2:
            server.has_ended.wait(0.5)  # a client that leaves now leaves before its Close is read
        return obey(request)

    server = peer(behave=behave)
    client = EnvClient(ConnectOptions(server.address))
    client.send_reset()
    client.send_reset()
    client.close()

    assert [type(request) for request in server.requests] == [Reset, Reset, Close]


@pytest.mark.parametrize(
    "answer",
    [ResetDone("77", b"", {}, ()), Closed(""), StepDone("", b"", [], b"", b"", {}, (), ())],
)
def test_an_answer_that_breaks_the_protocol_ends_the_session(
    peer: Callable[..., Peer], answer: Response
) -> None:
    client = EnvClient(ConnectOptions(peer(behave=lambda _: answer).address))

    with pytest.raises(RemoteProtocolError):
        client.reset()
    with pytest.raises(EndpointLostError, match="open a new one"):
        client.reset()
    client.close()


def test_the_user_learns_which_episodes_a_failure_has_cost(peer: Callable[..., Peer]) -> None:
    lost = EpisodeRecord("e", 0, 3, 2.5, False, False, 1, 2, seed=7)
    failure = dataclasses.replace(FATAL, is_recoverable=True, interrupted_episodes=(lost,))
    env = RemoteEnv(peer(behave=fails_on_step(failure)).address)
    env.reset()

    with pytest.raises(RemoteEnvError) as caught:
        env.step(1)
    env.close()

    assert caught.value.interrupted_episodes == (lost,)


class Bold(gymnasium.Env[Any, Any]):
    """Gives observations out of range."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.array([0, 5], np.float32), {}

    def step(self, _action: Any) -> Any:
        return np.array([0, 5], np.float32), 0.0, False, False, {}


@pytest.mark.parametrize(("client", "lanes"), [(RemoteEnv, 1), (RemoteVectorEnv, 2)])
def test_the_user_finds_conformance_warnings_in_the_infos_once(
    client: type[RemoteEnv] | type[RemoteVectorEnv], lanes: int
) -> None:
    with EnvServer(Bold, num_envs=lanes) as server:
        env = client(server.address)
        _, first = env.reset()
        _, again = env.reset()
        env.close()

    warning = "observation: 5.0 is above 1.0 (lane 0, element (1,))"
    assert lane_info(first, 0)["rlmesh.conformance.warning"] == [warning]
    assert "rlmesh.conformance.warning" not in again


# --- models ------------------------------------------------------------------------------

MODEL_YES = dataclasses.replace(YES, contract=None)


def test_every_context_names_a_session_also_where_the_server_gave_no_id(
    peer: Callable[..., Peer],
) -> None:
    server = peer(MODEL_YES, wire=model_wire)
    for _ in range(2):
        with RemoteModel(server.address) as model:
            model.configure_route(CONTRACT)
            model.predict(np.array([4]))

    sessions = [
        request.context.session_id
        for request in server.requests
        if isinstance(request, ConfigureRoute | Predict)
    ]
    assert sessions[0] == sessions[1] != sessions[2] == sessions[3]
    assert all(sessions)


def test_after_an_error_of_a_model_that_is_not_recoverable_only_close_is_sent(
    peer: Callable[..., Peer],
) -> None:
    failure = ModelFailed("", ModelErrorCode.INTERNAL, "the model is gone", is_recoverable=False)
    server = peer(
        MODEL_YES, lambda request: failure if isinstance(request, Predict) else obey(request),
        model_wire,
    )  # fmt: skip
    with RemoteModel(server.address) as model:
        model.configure_route(CONTRACT)
        with pytest.raises(RemoteModelError, match="the model is gone"):
            model.predict(np.array([4]))

        for ask in (lambda: model.predict(np.array([4])), model.close_route):
            with pytest.raises(
                EndpointLostError, match=r"INTERNAL: the model is gone.*open a new one"
            ):
                ask()

    assert [type(request) for request in server.requests] == [ConfigureRoute, Predict, CloseModel]
