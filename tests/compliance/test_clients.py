"""What the edition asks of clients: ours do it, and one that does not is found out.

The real server stands behind a recorder, which notes what a client does. For each clause
there is a judge of what was recorded, and a client that breaks just this clause.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlmesh_ray import EnvServer, ModelServer, RemoteModel, RemoteVectorEnv
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import EnvClient
from rlmesh_ray.client.model.remote_model import contract_of
from rlmesh_ray.compliance.action_cases import commands
from rlmesh_ray.compliance.probe import ProbeCommand
from rlmesh_ray.compliance.subjects import EnvSubject, ModelSubject
from rlmesh_ray.errors import HandshakeRefusedError, RlmeshError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.handshake import (
    EDITION_2026_06,
    GENERATION,
    HandshakeRequest,
    HandshakeResponse,
)
from rlmesh_ray.protocol.messages import (
    Close,
    EnvFailed,
    EnvRequest,
    Predict,
    Predicted,
    Reset,
    Step,
    StepDone,
)
from rlmesh_ray.wire._pb.rlmesh.env.v1.interaction_pb2 import JoinResponse
from rlmesh_ray.wire.rlmesh_v1 import env as wire
from tests.compliance.tampering import Sabotage, TamperingServer
from tests.loopback.ports import plain_channel

Event = tuple[str, Any]
CONTRACT = contract_of(gymnasium.make_vec("CartPole-v1", num_envs=2))


class Recorder(Sabotage):
    """Notes what happens, in order."""

    @property
    def log(self) -> list[Event]:
        log: list[Event] = self.memory.setdefault("log", [])
        return log

    def answer(self, offer: HandshakeRequest, answer: HandshakeResponse) -> HandshakeResponse:
        self.log.append(("handshake", (offer, answer)))
        return answer

    def joined(self, metadata: dict[str, str]) -> None:
        self.log.append(("join", metadata))

    def request(self, request: Any) -> Iterable[Any]:
        self.log.append(("request", request))
        return [request]

    def response(self, response: Any) -> Iterable[Any]:
        self.log.append(("response", response))
        return [response]


@contextmanager
def recorded(address: str) -> Iterator[tuple[str, list[Event]]]:
    """Yield the address of a recorder in front of ``address``, and its log."""
    with TamperingServer(address, "env", Recorder) as server:
        yield server.address, server.memory.setdefault("log", [])


# --- judges ----------------------------------------------------------------------------


def joins_after_a_handshake(log: list[Event]) -> bool:
    known = {
        answer.capabilities.get(capabilities.SESSION)
        for kind, (_, answer) in _of(log, "handshake")
        if answer.compatible
    }
    joins = [metadata.get(capabilities.SESSION_METADATA_KEY) for _, metadata in _of(log, "join")]
    is_first = bool(log) and log[0][0] == "handshake"
    return is_first and bool(joins) and all(session_id in known for session_id in joins)


def offers_all_it_can_do(log: list[Event]) -> bool:
    own = (EDITION_2026_06.name,)
    offers = [offer for _, (offer, _) in _of(log, "handshake")]
    return all((one.generation, one.editions) == (GENERATION, own) for one in offers)


def tries_once(log: list[Event]) -> bool:
    return len(list(_of(log, "handshake"))) == 1 and not list(_of(log, "join"))


def gives_up_after_a_fatal_error(log: list[Event]) -> bool:
    fatal = [
        index
        for index, (kind, message) in enumerate(log)
        if kind == "response" and isinstance(message, EnvFailed) and not message.is_recoverable
    ]
    later = [request for _, request in _of(log[fatal[0] :], "request")]
    return all(isinstance(request, Close) for request in later)


def _of(log: list[Event], wanted: str) -> Iterator[Event]:
    return (event for event in log if event[0] == wanted)


# --- session.handshake-first, session.offer ---------------------------------------------


def our_session(address: str) -> None:
    env = RemoteVectorEnv(address)
    env.reset(seed=1)
    env.close()


def a_session_without_a_handshake(address: str) -> None:
    with plain_channel(address) as channel:
        call = channel.stream_stream("/rlmesh.env.v1.EnvService/Join")
        frames = [wire.pack_request(Reset("1")), wire.pack_request(Close("2"))]
        assert len(list(call(iter(frames), timeout=10.0))) == 2


def a_session_that_offers_nothing(address: str) -> None:
    EnvSubject(ConnectOptions(address)).shake_hands(editions=())


@pytest.mark.parametrize(
    ("judge", "bad_client"),
    [
        pytest.param(
            joins_after_a_handshake, a_session_without_a_handshake, id="session.handshake-first"
        ),
        pytest.param(offers_all_it_can_do, a_session_that_offers_nothing, id="session.offer"),
    ],
)
def test_our_client_establishes_its_session_as_the_edition_says(
    probe: EnvServer,
    judge: Callable[[list[Event]], bool],
    bad_client: Callable[[str], None],
) -> None:
    with recorded(probe.address) as (address, log):
        our_session(address)
        assert judge(log)
    with recorded(probe.address) as (address, log):
        bad_client(address)
        assert not judge(log)


# --- session.one-round ------------------------------------------------------------------


class Refuses(Recorder):
    def answer(self, offer: HandshakeRequest, answer: HandshakeResponse) -> HandshakeResponse:
        no = replace(answer, compatible=False, error_message="not today", contract=None)
        return super().answer(offer, no)


def test_our_client_does_not_try_again_after_a_refusal(probe: EnvServer) -> None:
    with TamperingServer(probe.address, "env", Refuses) as server:
        with pytest.raises(HandshakeRefusedError, match=r"not today"):
            our_session(server.address)
        assert tries_once(server.memory["log"])

    with TamperingServer(probe.address, "env", Refuses) as server:
        for _ in range(2):
            EnvSubject(ConnectOptions(server.address)).shake_hands()
        assert not tries_once(server.memory["log"])


# --- errors.abandon ----------------------------------------------------------------------


def our_fatal_session(address: str) -> None:
    client = EnvClient(ConnectOptions(address))
    client.reset()
    for action in (ProbeCommand.OBSERVE_NAN, ProbeCommand.GO_ON):
        with suppress(RlmeshError):
            client.step(commands(action, action))
    with suppress(RlmeshError):
        client.reset()
    client.close()


def a_fatal_session_that_goes_on(address: str) -> None:
    with EnvSubject(ConnectOptions(address)).after_reset() as session:
        action = session.subject.command(ProbeCommand.OBSERVE_NAN)
        session.refused(session.step_request(action), "with NaN")
        session.ask(Reset(session.new_id()))


def test_our_client_gives_a_session_up_after_a_fatal_error(probe: EnvServer) -> None:
    with recorded(probe.address) as (address, log):
        our_fatal_session(address)
        assert gives_up_after_a_fatal_error(log)
    with recorded(probe.address) as (address, log):
        a_fatal_session_that_goes_on(address)
        assert not gives_up_after_a_fatal_error(log)


# --- vector.nonzero ----------------------------------------------------------------------


class SetsMasksToTwo(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, StepDone):
            response = replace(response, terminated=bytes(2 * bool(x) for x in response.terminated))
        return [response]


def ends_seen_by_our_client(address: str) -> list[bool]:
    client = EnvClient(ConnectOptions(address))
    client.reset()
    done = client.step(commands(ProbeCommand.GO_ON, ProbeCommand.TERMINATE))
    client.close()
    seen: list[bool] = done.terminated.tolist()
    return seen


def ends_seen_by_one_that_looks_for_ones(address: str) -> list[bool]:
    subject = EnvSubject(ConnectOptions(address))
    action = subject.command(ProbeCommand.GO_ON, ProbeCommand.TERMINATE)
    requests: list[EnvRequest] = [Reset("1"), Step("2", action), Close("3")]
    with plain_channel(address) as channel:
        call = channel.stream_stream("/rlmesh.env.v1.EnvService/Join")
        answers = list(call(map(wire.pack_request, requests), timeout=10.0))
    return [byte == 1 for byte in JoinResponse.FromString(answers[1]).step.terminated_mask]


def test_our_client_takes_any_nonzero_byte_for_an_end(probe: EnvServer) -> None:
    with TamperingServer(probe.address, "env", SetsMasksToTwo) as server:
        assert ends_seen_by_our_client(server.address) == [False, True]
        assert ends_seen_by_one_that_looks_for_ones(server.address) == [False, False]


# --- model.demultiplex -------------------------------------------------------------------


class AnswersTheSecondFirst(Sabotage):
    """Waits for two predictions and sends their responses the other way round."""

    def __init__(self, memory: dict[str, Any]) -> None:
        super().__init__(memory)
        self.asked: list[str] = []
        self.ready: dict[str, Any] = {}

    def request(self, request: Any) -> Iterable[Any]:
        if isinstance(request, Predict):
            self.asked.append(request.request_id)
        return [request]

    def response(self, response: Any) -> Iterable[Any]:
        if not isinstance(response, Predicted):
            return [response]
        self.ready[response.request_id] = response
        if len(self.ready) < 2:
            return []
        ready, self.ready = self.ready, {}
        return [ready[request_id] for request_id in reversed(self.asked)]


def is_right_of_centre(observations: Any) -> Any:
    return (observations[:, 0] > 0).astype(np.int64)


def actions_seen_by_our_client(address: str) -> list[list[int]]:
    def ask(route: str, value: float) -> list[int]:
        observation = np.full((2, 4), value, np.float32)
        actions: list[int] = model.predict(observation, route_id=route).tolist()
        return actions

    with RemoteModel(address) as model, ThreadPoolExecutor(2) as threads:
        for route in ("left", "right"):
            model.configure_route(CONTRACT, route_id=route)
        return list(threads.map(ask, ["left", "right"], [-1.0, 1.0]))


def actions_seen_by_one_that_counts_on_order(address: str) -> list[list[int]]:
    with ModelSubject(ConnectOptions(address), CONTRACT).session() as session:
        for route in ("left", "right"):
            session.configure(route)
        for route, value in (("left", -1.0), ("right", 1.0)):
            request = session.predict_request(route)
            observation = np.full((2, 4), value, np.float32).tobytes()
            session.send(replace(request, observation=observation))
        answers = [session.receive() for _ in range(2)]
    return [np.frombuffer(one.action, np.int64).tolist() for one in answers]  # type: ignore[union-attr]


def test_our_client_tells_responses_apart_by_their_ids() -> None:
    with (
        ModelServer(is_right_of_centre) as model,
        TamperingServer(model.address, "model", AnswersTheSecondFirst) as server,
    ):
        assert actions_seen_by_our_client(server.address) == [[0, 0], [1, 1]]
        assert actions_seen_by_one_that_counts_on_order(server.address) == [[1, 1], [0, 0]]
