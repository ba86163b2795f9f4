"""ModelServer under clients of rlmesh-wire-v1, in raw frames: what it is asked, tells and frees."""

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from rlmesh_ray import ModelServer, RemoteModel
from rlmesh_ray.dialects.released.protocol import (
    WIRE_V1,
    GroupedPredict,
    GroupedPredicted,
    make_released_offer,
)
from rlmesh_ray.dialects.released.wire import model as wire
from rlmesh_ray.dialects.released.wire import values
from rlmesh_ray.dialects.released.wire.model import MAX_ROWS, NO_LANE, FrameResponse
from rlmesh_ray.errors import ContractMismatchError
from rlmesh_ray.models.policy import EpisodeStates, Rows
from rlmesh_ray.protocol.capabilities import PROTOCOL_V1
from rlmesh_ray.protocol.handshake import HandshakeResponse
from rlmesh_ray.protocol.messages import (
    CloseModel,
    CloseRoute,
    ConfigureRoute,
    ModelClosed,
    ModelErrorCode,
    ModelFailed,
    Predict,
    PredictContext,
    Predicted,
    PredictSlot,
    RouteClosed,
    RouteConfigured,
)
from rlmesh_ray.protocol.model_session import EpisodesForgotten, ForgetEpisodes, SessionRequest
from rlmesh_ray.server.model import model_stream
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.wire._pb.rlmesh_wire.model.v1 import interaction_pb2 as pb
from rlmesh_ray.wire._pb.rlmesh_wire.spaces.v1.value_pb2 import SpaceValue
from rlmesh_ray.wire.rlmesh_v1.meta import encode_meta
from tests.loopback.eventually import eventually
from tests.loopback.ports import plain_channel
from tests.loopback.raw_join import MODEL_JOIN, RawJoin

Make = Callable[[str], SessionRequest | GroupedPredict]
"""Makes a request with an id."""
PATIENCE_S = 30.0
HANDSHAKE = "/rlmesh.model.v1.ModelService/Handshake"


def contract(name: str = "Toy-v0", actions: Any = None) -> EnvContract:
    return EnvContract(
        id=name,
        observation_space=from_gymnasium(spaces.Box(-10.0, 10.0, (2,), np.float32)),
        action_space=from_gymnasium(actions or spaces.Box(-1e6, 1e6, (1,), np.float32)),
        num_envs=1,
        autoreset_mode=AutoresetMode.DISABLED,
    )


CONTRACT = contract()


def rows(*first: float) -> NDArray[np.float32]:
    return np.array([[value, 0.0] for value in first], np.float32)


class Runtime:
    """One stream, as a runtime would hold it."""

    def __init__(self, address: str) -> None:
        self._channel = plain_channel(address)
        self.join = RawJoin(self._channel, MODEL_JOIN)
        self._num_requests = 0

    def send(self, make: Make) -> str:
        """Send a request without waiting for its answer."""
        self._num_requests += 1
        request_id = f"r{self._num_requests}"
        self.join.send([wire.pack_request(make(request_id))])
        return request_id

    def receive(self) -> FrameResponse | None:
        frame = self.join.receive()
        return None if frame is None else wire.parse_response(frame)

    def ask(self, make: Make) -> FrameResponse:
        request_id = self.send(make)
        response = self.receive()
        assert response is not None
        assert response.request_id == request_id
        return response

    def resolve(self, env: str = "a", spec: EnvContract = CONTRACT) -> FrameResponse:
        return self.ask(resolve(env, spec))

    def act(self, env: str, episodes: Sequence[str], *first: float) -> list[float]:
        """Return the actions for one observation an episode."""
        return actions_of(self.ask(predict(env, episodes, *first)))

    def close(self) -> None:
        self.join.close()
        self._channel.close()


def resolve(env: str = "a", spec: object = CONTRACT, horizon: int = 1) -> Any:
    return lambda request_id: ConfigureRoute(
        request_id, PredictContext("s", env, request_id), spec, horizon
    )


def predict_message(
    request_id: str, env: str, episodes: Sequence[str], first: Sequence[float]
) -> Predict:
    observation = values.encode_batch(CONTRACT.observation_space, [rows(*first)], len(first))
    slots = tuple(PredictSlot(NO_LANE, episode, 0, False) for episode in episodes)
    return Predict(request_id, PredictContext("s", env, f"{env}:{request_id}", slots), observation)


def predict(env: str, episodes: Sequence[str], *first: float) -> Any:
    return lambda request_id: predict_message(request_id, env, episodes, first)


def grouped(*groups: tuple[str, Sequence[str], Sequence[float]]) -> Any:
    return lambda request_id: GroupedPredict(
        request_id, tuple(predict_message(request_id, *group) for group in groups)
    )


def reset(env: str, *episodes: str) -> Any:
    return lambda request_id: ForgetEpisodes(request_id, PredictContext("s", env, ""), episodes)


def release(env: str) -> Any:
    return lambda request_id: CloseRoute(request_id, PredictContext("s", env, ""))


def actions_of(response: object) -> list[float]:
    assert isinstance(response, Predicted), response
    assert response.later == ()
    (leaf,) = SpaceValue.FromString(response.action).leaves
    actions: list[float] = np.frombuffer(leaf, "<f4").tolist()
    return actions


def code_of(response: object) -> ModelErrorCode:
    assert isinstance(response, ModelFailed), response
    assert response.is_recoverable
    return response.code


class Gate:
    """A policy function that shows the batches that it gets, and waits to be let through."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.batches: list[list[float]] = []
        self.entered = threading.Semaphore(0)
        self.may_pass = threading.Event()
        if is_open:
            self.may_pass.set()

    def __call__(self, observations: Any) -> Any:
        self.batches.append(observations[:, 0].tolist())
        self.entered.release()
        assert self.may_pass.wait(PATIENCE_S)
        return observations[:, :1]


class Counting:
    """Acts by how often it was asked since an episode began, and remembers that as others do."""

    def __init__(self) -> None:
        self.states: EpisodeStates[list[int]] = EpisodeStates(lambda: [0])
        self.checked: list[str] = []
        self.refusals: list[Exception] = []
        """What it raises next, in any method."""

    def check_contract(self, contract: EnvContract) -> None:
        self._maybe_refuse()
        self.checked.append(contract.id)

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        states = self.states.of(rows)
        for state in states:
            state[0] += 1
        self._maybe_refuse()
        return np.array(list(states), np.float32)

    def forget(self, route_key: str, env_index: int | None) -> None:
        self._maybe_refuse()
        self.states.forget(route_key, env_index)

    def _maybe_refuse(self) -> None:
        if self.refusals:
            raise self.refusals.pop()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.may_pass.set()


@pytest.fixture
def opened() -> Iterator[Callable[[ModelServer], Runtime]]:
    with ExitStack() as stack:

        def open_one(server: ModelServer) -> Runtime:
            runtime = Runtime(server.address)
            stack.callback(runtime.close)
            return runtime

        yield open_one


@pytest.fixture
def policy() -> Counting:
    return Counting()


@pytest.fixture
def server(policy: Counting) -> Iterator[ModelServer]:
    with ModelServer(policy) as running:
        yield running


@pytest.fixture
def runtime(server: ModelServer, opened: Callable[[ModelServer], Runtime]) -> Runtime:
    return opened(server)


# --- handshake, and the frame around it ------------------------------------------------


def shake_hands(address: str, edition: str = "2026.06") -> HandshakeResponse:
    offer = dataclasses.replace(make_released_offer("test", "1", {}), editions=(edition,))
    with plain_channel(address) as channel:
        call = channel.unary_unary(HANDSHAKE)
        return wire.HANDSHAKE.parse_response(
            call(wire.HANDSHAKE.pack_request(offer), timeout=PATIENCE_S)
        )


def test_a_handshake_says_what_is_possible_and_asks_for_no_history(server: ModelServer) -> None:
    answer = shake_hands(server.address)

    assert answer.compatible
    assert answer.editions == ("2026.06",)
    assert answer.capabilities == {"rlmesh.model.concurrent_predict.v1": "true"}


def test_a_handshake_without_a_common_edition_is_refused(server: ModelServer) -> None:
    answer = shake_hands(server.address, "2099.01")

    assert not answer.compatible
    assert "2099.01" in answer.error_message


def test_headers_come_before_the_first_word(server: ModelServer) -> None:
    # Else a client that waits for them would wait for ever.
    no_answer: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with plain_channel(server.address) as channel:
        frames = iter(no_answer.get, None)
        call = channel.stream_stream(MODEL_JOIN)(frames, timeout=PATIENCE_S)

        assert call.initial_metadata() is not None
        no_answer.put(None)


def test_a_stream_that_says_nothing_ends_well(server: ModelServer) -> None:
    with plain_channel(server.address) as channel:
        call = channel.stream_stream(MODEL_JOIN)(iter(()), timeout=PATIENCE_S)

        assert list(call) == []


# --- what is asked ---------------------------------------------------------------------


def test_an_adapter_acts_and_its_answers_carry_their_context() -> None:
    with ModelServer(Gate(is_open=True)) as server:
        runtime = Runtime(server.address)
        assert runtime.ask(resolve("a", horizon=4)) == (RouteConfigured("r1", 0))

        response = runtime.ask(predict("a", ["e", "f"], 3, 4))

        assert actions_of(response) == [3, 4]
        assert isinstance(response, Predicted)
        assert response.context == PredictContext("s", "a", "a:r2")
        runtime.close()


class Chunking:
    """Counts on from the first number of each observation, for three steps."""

    horizon = 3

    def __init__(self) -> None:
        self.asked: list[list[float]] = []

    def __call__(self, observations: Any) -> Any:
        self.asked.append(observations[:, 0].tolist())
        return (observations[:, :1] + np.arange(3, dtype=np.float32))[..., None]


def steps_of(response: object) -> list[list[float]]:
    """Return the actions of each step."""
    assert isinstance(response, Predicted), response
    steps = (response.action, *response.later)
    leaves = [SpaceValue.FromString(data).leaves for data in steps]
    return [np.frombuffer(leaf, "<f4").tolist() for (leaf,) in leaves]


@pytest.mark.parametrize(
    ("horizon", "steps"), [(0, 1), (1, 1), (2, 2), (3, 3)], ids=["unset", "one", "some", "all"]
)
def test_a_runtime_gets_as_many_actions_of_a_chunk_as_it_executes(
    opened: Callable[[ModelServer], Runtime], horizon: int, steps: int
) -> None:
    with ModelServer(Chunking()) as server:
        runtime = opened(server)
        resolved = runtime.ask(resolve("a", horizon=horizon))
        response = runtime.ask(predict("a", ["e", "f"], 3, 40))
        together = runtime.ask(grouped(("a", ["e"], [5]), ("a", ["f"], [6])))

    assert resolved == RouteConfigured("r1", 3)
    assert steps_of(response) == [[3, 40], [4, 41], [5, 42]][:steps]
    assert isinstance(together, GroupedPredicted)
    assert [steps_of(result) for result in together.results] == [
        [[first + step] for step in range(steps)] for first in (5, 6)
    ]


def test_a_horizon_beyond_the_chunk_is_refused(opened: Callable[[ModelServer], Runtime]) -> None:
    with ModelServer(Chunking()) as server:
        runtime = opened(server)
        refused = runtime.ask(resolve("a", horizon=4))
        accepted = runtime.ask(resolve("a", horizon=3))

    assert code_of(refused) is ModelErrorCode.INVALID_REQUEST
    assert isinstance(refused, ModelFailed)
    assert "wants 4 actions at once, and the policy chooses 3" in refused.message
    assert isinstance(accepted, RouteConfigured)


def test_an_adapter_that_is_resolved_for_another_horizon_has_that(
    opened: Callable[[ModelServer], Runtime],
) -> None:
    with ModelServer(Chunking()) as server:
        runtime = opened(server)
        found = []
        for horizon in (2, 3, 1):
            runtime.ask(resolve("a", horizon=horizon))
            found.append(len(steps_of(runtime.ask(predict("a", ["e"], 3)))))

    assert found == [2, 3, 1]


def test_an_endpoint_may_keep_chunks_for_a_runtime_that_takes_one_action(
    opened: Callable[[ModelServer], Runtime],
) -> None:
    policy = Chunking()
    with ModelServer(policy, chunk_replay="kept") as server:
        runtime = opened(server)
        runtime.resolve()
        acted = [runtime.act("a", ["e", "f"], 10 * step, 100) for step in range(2)]
        runtime.ask(reset("a", "e"))
        acted += [runtime.act("a", ["g", "f"], 10 * step, 200) for step in range(2, 4)]

    assert acted == [[0, 100], [1, 101], [20, 102], [21, 200]]
    assert policy.asked == [[0, 100], [20], [200]]


def test_every_answer_tells_what_it_took(runtime: Runtime) -> None:
    def reported(make: Make) -> pb.JoinResponse:
        runtime.send(make)
        return pb.JoinResponse.FromString(runtime.join.receive() or b"")

    resolved = reported(resolve())
    predicted = reported(predict("a", ["e", "f"], 1, 2))
    together = reported(grouped(("a", ["e"], [1]), ("b", ["e"], [1])))

    assert (resolved.HasField("user_ns"), resolved.in_flight) == (False, 1)
    assert resolved.endpoint_total_ns
    for timings in (predicted, together):
        assert (timings.held_episodes, timings.in_flight) == (2, 1)
        parts = [timings.decode_ns, timings.user_ns, timings.encode_ns, timings.queue_ns]
        assert all(0 < part < timings.endpoint_total_ns for part in parts)


def test_a_torch_module_acts_as_it_does_in_process() -> None:
    torch.manual_seed(0)
    module = torch.nn.Linear(2, 1)
    batch = np.random.default_rng(0).normal(size=16).astype(np.float32)
    with torch.inference_mode():
        expected = module(torch.from_numpy(rows(*batch))).numpy()[:, 0]

    with ModelServer(module) as server:
        runtime = Runtime(server.address)
        runtime.resolve()
        actions = runtime.act("a", [f"e{n}" for n in range(16)], *batch)
        runtime.close()

    assert actions == expected.tolist()


def test_what_is_wrong_with_a_request_is_reported_and_the_session_goes_on(runtime: Runtime) -> None:
    runtime.resolve()
    invalid = ModelErrorCode.INVALID_REQUEST
    wrong: list[tuple[Any, ModelErrorCode, str]] = [
        (predict("b", ["e"], 1), ModelErrorCode.NOT_CONFIGURED, "resolve_adapter first"),
        (predict("", ["e"], 1), invalid, "no env_id"),
        (predict("a", [], 1), invalid, "no episodes"),
        (predict("a", [""], 1), invalid, "empty episode_id"),
        (predict("a", ["e", "e"], 1, 2), invalid, "twice"),
        (predict("a", ["e", "f"], 1), invalid, "expected 16"),
        (predict("a", ["e"], np.nan), invalid, "observation space"),
        (grouped(), invalid, "no groups"),
        (resolve("b", None), invalid, "no env_spec"),
        (resolve(""), invalid, "no env_id"),
    ]

    for make, code, reason in wrong:
        response = runtime.ask(make)
        assert code_of(response) is code, reason
        assert isinstance(response, ModelFailed)
        assert reason in response.message

    # None of them has been the first of its episode.
    assert runtime.act("a", ["e"], 1) == [1]


def test_a_frame_that_is_none_is_answered_in_band(runtime: Runtime) -> None:
    runtime.resolve()

    runtime.join.send([b"\xff\xff"])
    refusal = runtime.receive()

    assert code_of(refusal) is ModelErrorCode.INVALID_REQUEST
    assert runtime.act("a", ["e"], 1) == [1]


def test_a_policy_that_refuses_an_environment_is_reported_at_resolve(
    runtime: Runtime, policy: Counting
) -> None:
    policy.refusals = [ContractMismatchError("not this one")]

    response = runtime.resolve()

    assert code_of(response) is ModelErrorCode.INVALID_REQUEST
    assert code_of(runtime.ask(predict("a", ["e"], 1))) is ModelErrorCode.NOT_CONFIGURED
    assert isinstance(runtime.resolve(), RouteConfigured)


def test_a_policy_that_raises_is_reported_with_its_trace(
    runtime: Runtime, policy: Counting
) -> None:
    runtime.resolve()
    policy.refusals = [ValueError("not today")]

    response = runtime.ask(predict("a", ["e"], 1))

    assert code_of(response) is ModelErrorCode.INTERNAL
    assert isinstance(response, ModelFailed)
    assert "not today" in response.message
    assert "Traceback" in response.debug_info


def test_an_adapter_s_name_is_not_kept_however_long_it_is(runtime: Runtime) -> None:
    env = "e" * 100_000

    assert code_of(runtime.resolve(env)) is ModelErrorCode.INVALID_REQUEST
    refusal = runtime.ask(predict(env, ["e"], 1))

    assert code_of(refusal) is ModelErrorCode.NOT_CONFIGURED
    assert isinstance(refusal, ModelFailed)
    assert len(refusal.message) < 1000


def test_adapters_without_end_are_refused(runtime: Runtime) -> None:
    for env in ("a", *map(str, range(model_stream.MAX_ROUTES - 1))):
        runtime.resolve(env)

    assert code_of(runtime.resolve("c")) is ModelErrorCode.BUSY
    runtime.ask(release("a"))
    assert isinstance(runtime.resolve("c"), RouteConfigured)


# --- episodes --------------------------------------------------------------------------


def test_what_a_policy_remembers_goes_by_episodes(runtime: Runtime) -> None:
    for env in "ab":
        runtime.resolve(env)

    assert runtime.act("a", ["e", "f"], 0, 0) == [1, 1]
    assert runtime.act("a", ["f"], 0) == [2]
    assert runtime.act("b", ["f"], 0) == [1]  # of another adapter
    assert runtime.act("a", ["g", "f", "e"], 0, 0, 0) == [1, 3, 2]
    assert isinstance(runtime.ask(reset("a", "f", "unknown")), EpisodesForgotten)
    assert runtime.act("a", ["e", "f"], 0, 0) == [3, 1]


def test_a_recurrent_module_goes_on_where_each_episode_was() -> None:
    class Sum(torch.nn.Module):
        def initial_state(self) -> torch.Tensor:
            return torch.zeros(1)

        def forward(self, observations: Any, state: Any) -> tuple[Any, Any]:
            after = state + observations[:, :1]
            return after, after

    with ModelServer(Sum()) as server:
        runtime = Runtime(server.address)
        runtime.resolve()
        assert runtime.act("a", ["e", "f"], 1, 2) == [1, 2]
        assert runtime.act("a", ["f", "g", "e"], 3, 4, 5) == [5, 4, 6]
        runtime.ask(reset("a", "f"))
        assert runtime.act("a", ["h", "e", "f"], 1, 1, 1) == [1, 7, 1]
        runtime.close()


def test_an_episode_whose_first_prediction_failed_begins_with_the_next(
    runtime: Runtime, policy: Counting
) -> None:
    runtime.resolve()
    runtime.act("a", ["e"], 0)
    policy.refusals = [ValueError("not now")]
    assert code_of(runtime.ask(predict("a", ["e", "f"], 0, 0))) is ModelErrorCode.INTERNAL

    # The policy has begun with both of them, and only one is known to the client.
    assert runtime.act("a", ["e", "f"], 0, 0) == [3, 1]


def test_the_end_of_an_episode_waits_for_its_predictions(gate: Gate) -> None:
    with ModelServer(gate) as server:
        runtime = Runtime(server.address)
        runtime.resolve()
        ids = [
            runtime.send(make)
            for make in (
                predict("a", ["e"], 1),
                predict("a", ["e"], 2),
                reset("a", "e"),
                predict("a", ["e"], 3),
                release("a"),
            )
        ]
        gate.may_pass.set()

        answers = [runtime.receive() for _ in ids]

        assert [answer and answer.request_id for answer in answers] == ids
        assert gate.batches == [[1], [2], [3]]
        runtime.close()


def test_ten_thousand_episodes_leave_nothing_behind(runtime: Runtime, policy: Counting) -> None:
    runtime.resolve()
    most = 0

    for batch in range(200):
        episodes = [f"{batch}.{number}" for number in range(50)]
        assert runtime.act("a", episodes, *[0.0] * 50) == [1] * 50
        most = max(most, len(policy.states))
        runtime.ask(reset("a", *episodes))

    assert (most, len(policy.states)) == (50, 0)
    runtime.send(predict("a", ["one"], 0))
    assert pb.JoinResponse.FromString(runtime.join.receive() or b"").held_episodes == 1


def test_episodes_that_never_end_are_refused_and_none_is_dropped(runtime: Runtime) -> None:
    runtime.resolve()
    for first in range(0, 2**16, MAX_ROWS):
        runtime.act("a", [str(first + row) for row in range(MAX_ROWS)], *[0.0] * MAX_ROWS)

    refusal = runtime.ask(predict("a", ["0", "one more"], 0, 0))

    assert code_of(refusal) is ModelErrorCode.BUSY
    assert isinstance(refusal, ModelFailed)
    assert "65536 are the limit: report the ended ones" in refusal.message
    assert runtime.act("a", ["0"], 0) == [2]
    runtime.ask(reset("a", "7"))
    assert runtime.act("a", ["0", "one more"], 0, 0) == [3, 1]


def test_an_adapter_that_is_resolved_again_keeps_its_episodes_while_its_spec_is_the_same(
    runtime: Runtime, policy: Counting
) -> None:
    runtime.resolve()
    runtime.act("a", ["e"], 0)

    runtime.resolve()
    assert runtime.act("a", ["e"], 0) == [2]
    runtime.resolve(spec=contract("Other-v0"))

    assert runtime.act("a", ["e"], 0) == [1]
    assert len(policy.states) == 1


def test_an_adapter_that_cannot_become_another_stays_and_can_be_released(
    runtime: Runtime, policy: Counting
) -> None:
    runtime.resolve()
    runtime.act("a", ["e"], 0)
    policy.refusals = [ContractMismatchError("not that one")]

    refusal = runtime.resolve(spec=contract("Other-v0"))

    assert code_of(refusal) is ModelErrorCode.INVALID_REQUEST
    assert runtime.act("a", ["e"], 0) == [2]
    assert isinstance(runtime.ask(release("a")), RouteClosed)
    assert eventually(lambda: len(policy.states) == 0)  # the answer does not wait for the policy


def test_what_else_a_spec_tells_does_not_matter_when_it_is_resolved_again(
    runtime: Runtime,
) -> None:
    spec = pb.JoinRequest.FromString(wire.pack_request(resolve()("r1")))
    # Arrays, which do not compare like other values.
    metadata = encode_meta({"pose": np.zeros(3)}, tag_arrays=True)
    spec.resolve_adapter.env_spec.metadata.MergeFromString(metadata.SerializeToString())
    frame = spec.SerializeToString()

    assert isinstance(wire.parse_response(runtime.join.ask(frame)), RouteConfigured)
    runtime.act("a", ["e"], 0)
    assert isinstance(wire.parse_response(runtime.join.ask(frame)), RouteConfigured)

    assert runtime.act("a", ["e"], 0) == [2]


@pytest.mark.parametrize("ending", [release("a"), resolve("a", contract("Other-v0"))])
def test_episodes_end_with_their_adapter(ending: Any, runtime: Runtime) -> None:
    runtime.resolve("a")
    runtime.resolve("b")
    runtime.act("a", ["e", "f"], 0, 0)
    runtime.act("b", ["e"], 0)

    runtime.ask(ending)
    runtime.send(predict("b", ["e"], 0))

    assert pb.JoinResponse.FromString(runtime.join.receive() or b"").held_episodes == 1


def test_ends_of_what_is_not_there_are_none(runtime: Runtime) -> None:
    assert isinstance(runtime.ask(reset("a", "e")), EpisodesForgotten)
    assert isinstance(runtime.ask(release("a")), RouteClosed)
    runtime.resolve()
    assert isinstance(runtime.ask(reset("a")), EpisodesForgotten)
    assert isinstance(runtime.ask(release("a")), RouteClosed)
    assert isinstance(runtime.ask(release("a")), RouteClosed)


def test_a_policy_that_does_not_forget_is_reported_and_may_be_asked_again(
    runtime: Runtime, policy: Counting
) -> None:
    runtime.resolve()
    runtime.act("a", ["e"], 0)
    policy.refusals = [ValueError("never")]

    assert code_of(runtime.ask(reset("a", "e"))) is ModelErrorCode.INTERNAL
    assert len(policy.states) == 1
    runtime.ask(reset("a", "e"))

    assert len(policy.states) == 0


# --- groups and batches ----------------------------------------------------------------


def test_groups_run_in_one_batch_and_fail_by_themselves() -> None:
    with ModelServer(Gate(is_open=True)) as server:
        runtime = Runtime(server.address)
        for env in "ab":
            runtime.resolve(env)

        response = runtime.ask(
            grouped(("a", ["e"], [1]), ("c", ["e"], [2]), ("b", ["e", "f"], [3, 4]))
        )

        assert isinstance(response, GroupedPredicted)
        first, second, third = response.results
        assert (actions_of(first), actions_of(third)) == ([1], [3, 4])
        assert code_of(second) is ModelErrorCode.NOT_CONFIGURED
        assert server.statistics().batches == 1
        runtime.close()


def test_a_group_that_cannot_be_read_takes_no_other_with_it(runtime: Runtime) -> None:
    for env in "ab":
        runtime.resolve(env)

    response = runtime.ask(grouped(("a", ["e", "f"], [1]), ("b", ["e"], [1])))

    assert isinstance(response, GroupedPredicted)
    bad, good = response.results
    assert code_of(bad) is ModelErrorCode.INVALID_REQUEST
    assert actions_of(good) == [1]


def test_who_has_sent_groups_and_says_no_more_is_answered(server: ModelServer) -> None:
    # The first of them is refused before the second one begins.
    frames = [
        wire.pack_request(resolve("b")("1")),
        wire.pack_request(grouped(("a", ["e"], [1]), ("b", ["e"], [1]))("2")),
    ]
    with plain_channel(server.address) as channel:
        call = channel.stream_stream(MODEL_JOIN)(iter(frames), timeout=PATIENCE_S)

        answers = [wire.parse_response(frame) for frame in call]

    assert [type(answer) for answer in answers] == [RouteConfigured, GroupedPredicted]


def test_adapters_sessions_and_generations_share_batches(gate: Gate) -> None:
    with (
        ModelServer(gate) as server,
        RemoteModel(server.address) as edition,
        ThreadPoolExecutor() as aside,
    ):
        first, second = Runtime(server.address), Runtime(server.address)
        edition.configure_route(CONTRACT)
        first.resolve("a")
        first.resolve("b")
        second.resolve("a")

        # While one prediction runs, four others come to wait.
        first.send(predict("a", ["e"], 1))
        assert gate.entered.acquire(timeout=PATIENCE_S)
        first.send(predict("b", ["e", "f"], 2, 3))
        second.send(predict("a", ["e"], 4))
        mine = aside.submit(edition.predict, rows(5))
        assert eventually(lambda: server.statistics().items_waiting == 3)
        gate.may_pass.set()

        assert [actions_of(first.receive()) for _ in range(2)] == [[1], [2, 3]]
        assert actions_of(second.receive()) == [4]
        assert mine.result(PATIENCE_S).tolist() == [[5]]
        statistics = server.statistics()
        assert (statistics.batches, statistics.items, statistics.rows) == (2, 4, 5)
        assert sorted(gate.batches[1]) == [2, 3, 4, 5]
        first.close()
        second.close()


# --- ends ------------------------------------------------------------------------------


def test_close_is_answered_after_all_others_and_ends_the_stream(gate: Gate) -> None:
    with ModelServer(gate) as server:
        runtime = Runtime(server.address)
        for env in "ab":
            runtime.resolve(env)
        runtime.send(predict("a", ["e"], 1))
        assert gate.entered.acquire(timeout=PATIENCE_S)
        runtime.send(grouped(("a", ["e"], [2]), ("b", ["e"], [3])))
        runtime.send(lambda request_id: CloseModel(request_id, "done"))
        gate.may_pass.set()

        kinds = [type(runtime.receive()) for _ in range(3)]

        assert kinds == [Predicted, GroupedPredicted, ModelClosed]
        assert runtime.receive() is None
        assert not server.wait(0.0)
        runtime.close()


@pytest.mark.parametrize("says_so", [True, False])
def test_a_runtime_that_leaves_is_forgotten(
    says_so: bool, runtime: Runtime, policy: Counting
) -> None:
    for env in "ab":
        runtime.resolve(env)
        runtime.act(env, ["e", "f"], 0, 0)
    assert len(policy.states) == 4

    if says_so:
        runtime.ask(lambda request_id: CloseModel(request_id))
        assert runtime.receive() is None
    runtime.close()

    assert eventually(lambda: len(policy.states) == 0)


def test_a_runtime_that_says_no_more_is_answered_and_forgotten(
    server: ModelServer, policy: Counting
) -> None:
    makers = [resolve(), predict("a", ["e"], 1), predict("a", ["e"], 1)]
    frames = [wire.pack_request(make(str(number))) for number, make in enumerate(makers)]
    with plain_channel(server.address) as channel:
        call = channel.stream_stream(MODEL_JOIN)(iter(frames), timeout=PATIENCE_S)
        answers = [wire.parse_response(frame) for frame in call]

    assert [actions_of(answer) for answer in answers[1:]] == [[1], [2]]
    assert eventually(lambda: len(policy.states) == 0)


def test_a_stream_may_begin_with_any_request(
    server: ModelServer, opened: Callable[[ModelServer], Runtime]
) -> None:
    for make, kind in [
        (predict("a", ["e"], 1), ModelFailed),
        (grouped(("a", ["e"], [1])), GroupedPredicted),
        (reset("a"), EpisodesForgotten),
        (release("a"), RouteClosed),
        (lambda request_id: CloseModel(request_id), ModelClosed),
    ]:
        assert type(opened(server).ask(make)) is kind


@pytest.mark.parametrize(
    ("dialects", "reaches"), [((PROTOCOL_V1,), False), ((WIRE_V1,), True), (None, True)]
)
def test_the_dialects_of_an_endpoint_may_be_chosen(
    dialects: tuple[str, ...] | None, reaches: bool, policy: Counting
) -> None:
    with ModelServer(policy, dialects=dialects) as server:
        runtime = Runtime(server.address)

        assert shake_hands(server.address).compatible is reaches
        if reaches:
            assert isinstance(runtime.resolve(), RouteConfigured)
        else:
            with pytest.raises(grpc.RpcError, match=f"not speak {WIRE_V1}") as caught:
                runtime.resolve()
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        runtime.close()
