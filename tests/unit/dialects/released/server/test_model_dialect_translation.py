"""Model streams of rlmesh-wire-v1, frame by frame, with the session that they are for."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh_ray.dialects.released.protocol import MODEL_RULES, GroupedPredict, GroupedPredicted
from rlmesh_ray.dialects.released.server.model_dialect import (
    PendingFrame,
    ReleasedModelServerDialect,
)
from rlmesh_ray.dialects.released.wire import model as wire
from rlmesh_ray.dialects.released.wire.model import NO_LANE, FrameRequest, FrameResponse
from rlmesh_ray.protocol.messages import (
    BatchRun,
    CloseModel,
    CloseRoute,
    ConfigureRoute,
    MalformedRequest,
    ModelClosed,
    ModelErrorCode,
    ModelFailed,
    Predict,
    PredictContext,
    Predicted,
    PredictSlot,
    RouteClosed,
    RouteConfigured,
    RouteRequest,
)
from rlmesh_ray.protocol.model_session import (
    EpisodesForgotten,
    ForgetEpisodes,
    ModelSession,
    SessionEvent,
    SessionResponse,
)
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.wire._pb.rlmesh_wire.model.v1 import interaction_pb2 as pb
from rlmesh_ray.wire._pb.rlmesh_wire.spaces.v1.value_pb2 import SpaceValue

SPACE = from_gymnasium(spaces.Discrete(2))
CONTRACT = EnvContract("Toy-v0", SPACE, SPACE, 1, AutoresetMode.DISABLED)


def value(text: str) -> bytes:
    return SpaceValue(leaves=[text.encode()]).SerializeToString()


def context(env: str = "a", request_id: str = "q", *slots: PredictSlot) -> PredictContext:
    return PredictContext("session", env, request_id, slots)


def resolve(request_id: str = "r", env: str = "a", horizon: int = 1) -> ConfigureRoute:
    return ConfigureRoute(request_id, context(env), CONTRACT, horizon)


def predict(request_id: str = "r", env: str = "a", *episodes: str) -> Predict:
    slots = [PredictSlot(NO_LANE, episode, 4, False) for episode in episodes or ("e",)]
    return Predict(request_id, context(env, request_id, *slots), value("observation"))


def grouped(request_id: str, *envs: str) -> GroupedPredict:
    return GroupedPredict(request_id, tuple(predict("", env) for env in envs))


def frame(request_id: str, **kind: Any) -> bytes:
    return pb.JoinRequest(request_id=request_id, **kind).SerializeToString()


def failed(request: RouteRequest) -> ModelFailed:
    return ModelFailed(request.request_id, ModelErrorCode.INTERNAL, "no", True, "trace")


def done(request: RouteRequest, run: BatchRun | None = None) -> SessionResponse:
    """Return what a host would answer: its action tells the route."""
    match request:
        case ConfigureRoute():
            return RouteConfigured(request.request_id)
        case Predict():
            action = value(request.context.route_id)
            return Predicted(request.request_id, request.context, action, run, 30)
        case ForgetEpisodes():
            return EpisodesForgotten(request.request_id)
        case _:
            return RouteClosed(request.request_id)


class Stream:
    """A stream whose host does what the test tells it, when it tells it."""

    def __init__(self, *resolved: str) -> None:
        self.dialect = ReleasedModelServerDialect()
        self.session = ModelSession(MODEL_RULES)
        self.working: list[RouteRequest] = []
        self.frames: list[bytes] = []
        for env in resolved:
            self.send(resolve("resolve", env))
            self.finish()
        self.frames.clear()

    @property
    def sent(self) -> list[FrameResponse]:
        return list(map(wire.parse_response, self.frames))

    @property
    def in_flight(self) -> list[int]:
        """The requests without an answer, as the answers report them."""
        return [pb.JoinResponse.FromString(each).in_flight for each in self.frames]

    def send(self, request: FrameRequest | bytes) -> None:
        if not isinstance(request, bytes):
            assert not isinstance(request, MalformedRequest)
            request = wire.pack_request(request)
        self._follow(self.dialect.receive(self.session, request))

    def finish(
        self, which: int = 0, answer: Callable[[RouteRequest], SessionResponse] = done
    ) -> RouteRequest:
        """Have the host answer one of the requests that it works on."""
        request = self.working.pop(which)
        self._follow(self.session.complete(request, answer(request)))
        return request

    def _follow(self, following: list[SessionEvent]) -> None:
        for event in following:
            if isinstance(event, RouteRequest):
                self.working.append(event)
                continue
            frame = self.dialect.frame(event)
            if frame is not None:
                self.frames.append(frame)


def predicted(request_id: str, asked: PredictContext, *actions: str) -> Predicted:
    """Return an answer as it is read: it has no slots."""
    mirrored = PredictContext(asked.session_id, asked.route_id, asked.request_id)
    first, *later = map(value, actions)
    return Predicted(request_id, mirrored, first, later=tuple(later))


def test_an_adapter_is_a_route_known_by_its_environment() -> None:
    stream = Stream()

    stream.send(resolve("r1", horizon=4))
    (request,) = stream.working
    stream.finish()

    assert isinstance(request, ConfigureRoute)
    assert request.context.route_id == "a"
    assert isinstance(request.contract, EnvContract)
    assert (request.contract.id, request.contract.action_space) == (CONTRACT.id, SPACE)
    assert request.horizon == 4
    # A policy of one action has no chunk, and former observations are not asked for.
    assert stream.sent == [RouteConfigured("r1", 0)]
    message = pb.JoinResponse.FromString(stream.frames[0])
    assert not message.resolve_adapter.HasField("native_chunk")
    assert not message.resolve_adapter.history.keys


def test_a_prediction_goes_by_episodes_and_comes_back_with_its_context() -> None:
    stream = Stream("a")
    asked = predict("r1", "a", "e", "f")

    stream.send(asked)
    (request,) = stream.working
    stream.finish()

    assert isinstance(request, Predict)
    assert request.context == asked.context
    assert [slot[:3] for slot in request.context.slots] == [(-1, "e", 4), (-1, "f", 4)]
    assert request.observation == value("observation")
    assert stream.sent == [predicted("r1", asked.context, "a")]


def test_a_policy_s_chunks_are_the_list_of_actions() -> None:
    def chunked(request: RouteRequest) -> SessionResponse:
        if isinstance(request, ConfigureRoute):
            return RouteConfigured(request.request_id, horizon=3)
        first, *later = map(value, "123")
        return Predicted(request.request_id, request.context, first, later=tuple(later))

    stream = Stream()
    stream.send(resolve("r1"))
    request = stream.finish(answer=chunked)
    asked = predict("r2")
    stream.send(asked)
    stream.finish(answer=chunked)

    assert isinstance(request, ConfigureRoute)
    assert request.horizon == 1
    assert stream.sent == [RouteConfigured("r1", 3), predicted("r2", asked.context, *"123")]


def test_episodes_and_adapters_end_in_their_turn() -> None:
    stream = Stream("a")
    for request in (
        predict("1"),
        ForgetEpisodes("2", context(), ("e", "f")),
        CloseRoute("3", context(), "bye"),
        predict("4"),
    ):
        stream.send(request)

    asked = [stream.finish() for _ in range(3)]

    assert [type(request) for request in asked] == [Predict, ForgetEpisodes, CloseRoute]
    assert isinstance(asked[1], ForgetEpisodes)
    assert asked[1].episode_ids == ("e", "f")
    assert stream.sent[1:3] == [EpisodesForgotten("2"), RouteClosed("3")]
    refusal = stream.sent[3]
    assert isinstance(refusal, ModelFailed)
    assert (refusal.request_id, refusal.code) == ("4", ModelErrorCode.NOT_CONFIGURED)
    assert "resolve_adapter first" in refusal.message


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (wire.pack_request(resolve(env="")), "no env_id"),
        (frame("r", resolve_adapter={"context": {"env_id": "a"}}), "no env_spec"),
        (
            frame(
                "r",
                resolve_adapter={
                    "context": {"env_id": "a"},
                    "env_spec": {},
                    "selected_workflow_edition": "2099.01",
                },
            ),
            "'2099.01'; this is 2026.06",
        ),
        (wire.pack_request(predict("r", "")), "no env_id"),
        (wire.pack_request(GroupedPredict("r", ())), "no groups"),
        (frame("r"), "no kind of request"),
    ],
)
def test_what_makes_no_sense_is_refused_under_its_own_id(data: bytes, reason: str) -> None:
    stream = Stream("a")

    stream.send(data)

    (refusal,) = stream.sent
    assert isinstance(refusal, ModelFailed)
    assert (refusal.request_id, refusal.code) == ("r", ModelErrorCode.INVALID_REQUEST)
    assert refusal.is_recoverable
    assert reason in refusal.message
    assert stream.working == []


@pytest.mark.parametrize("edition", ["", "2026.06", "2026.06-0.1.0-rc.5"])
def test_an_adapter_is_resolved_in_the_edition_that_is_spoken_here(edition: str) -> None:
    stream = Stream()
    message = pb.JoinRequest.FromString(wire.pack_request(resolve()))
    message.resolve_adapter.selected_workflow_edition = edition

    stream.send(message.SerializeToString())

    assert len(stream.working) == 1


def test_a_failure_is_reported_under_the_client_s_id_with_all_that_is_known() -> None:
    stream = Stream("a")

    stream.send(predict("r1"))
    stream.finish(answer=failed)

    assert stream.sent == [ModelFailed("r1", ModelErrorCode.INTERNAL, "no", True, "trace")]


def test_a_client_may_use_an_id_twice() -> None:
    stream = Stream("a", "b")

    stream.send(predict("same", "a"))
    stream.send(predict("same", "b"))
    stream.finish(1)
    stream.finish(0)

    assert [(r.request_id, r.action) for r in stream.sent if isinstance(r, Predicted)] == [
        ("same", value("b")),
        ("same", value("a")),
    ]


def test_groups_are_asked_at_once_and_answered_together_in_their_order() -> None:
    stream = Stream("a", "b", "c")

    stream.send(grouped("r1", "a", "b", "c"))
    assert len(stream.working) == 3
    stream.finish(2)
    stream.finish(0, failed)
    assert stream.sent == []
    stream.finish(0)

    (response,) = stream.sent
    assert isinstance(response, GroupedPredicted)
    first, second, third = response.results
    assert isinstance(first, ModelFailed)
    assert (second, third) == (
        predicted("", context("b", ""), "b"),
        predicted("", context("c", ""), "c"),
    )


def test_groups_fail_by_themselves() -> None:
    stream = Stream("a")

    stream.send(grouped("r1", "unresolved", "a", ""))
    stream.finish()

    (response,) = stream.sent
    assert isinstance(response, GroupedPredicted)
    codes = [
        result.code if isinstance(result, ModelFailed) else None for result in response.results
    ]
    assert codes == [ModelErrorCode.NOT_CONFIGURED, None, ModelErrorCode.INVALID_REQUEST]


def test_groups_of_one_adapter_take_turns() -> None:
    stream = Stream("a")

    stream.send(grouped("r1", "a", "a"))
    assert len(stream.working) == 1
    stream.finish()
    assert stream.sent == []
    stream.finish()

    assert [type(response) for response in stream.sent] == [GroupedPredicted]


def test_close_is_answered_after_everything_and_nothing_may_follow_it() -> None:
    stream = Stream("a", "b")

    stream.send(grouped("1", "a", "b"))
    stream.send(CloseModel("2", "bye"))
    for request in (grouped("3", "a"), predict("4"), ForgetEpisodes("5", context(), ())):
        stream.send(request)
    refusals = stream.sent
    stream.frames.clear()
    stream.finish()
    stream.finish()

    assert [response.request_id for response in refusals] == ["3", "4", "5"]
    for refusal in refusals:
        assert isinstance(refusal, ModelFailed)
        assert (refusal.code, refusal.is_recoverable) == (ModelErrorCode.CLOSED, False)
    assert [type(response) for response in stream.sent] == [GroupedPredicted, ModelClosed]


def test_what_is_in_flight_are_frames_not_groups() -> None:
    stream = Stream("a", "b", "c")

    stream.send(grouped("1", "a", "b"))
    stream.send(predict("2", "c"))
    stream.finish(1)
    stream.finish(0)
    stream.finish(0)

    assert stream.in_flight == [2, 1]


# --- timings ---------------------------------------------------------------------------


def timings_of(*answers: SessionResponse) -> dict[str, int]:
    pending = PendingFrame("r", len(answers) > 1, 1000, 7, list(answers), 0)
    return pending.timings(ended_ns=5000, encode_ns=11, in_flight=2, held_episodes=3)


def test_a_prediction_tells_where_its_time_went() -> None:
    run = BatchRun(1, 8, 100, "server", decode_ns=20, encode_ns=40)

    assert timings_of(done(predict(), run)) == {
        "endpoint_total_ns": 4000,
        "decode_ns": 27,
        "user_ns": 100,
        "encode_ns": 51,
        "queue_ns": 30,
        "in_flight": 2,
        "held_episodes": 3,
    }


def test_groups_that_shared_a_batch_share_what_it_took() -> None:
    shared = BatchRun(1, 8, 100, "server", decode_ns=20, encode_ns=40)
    other = BatchRun(1, 8, 100, "server", decode_ns=20, encode_ns=40)

    together = timings_of(*(done(predict(), run) for run in (shared, other, shared)))

    assert (together["user_ns"], together["decode_ns"], together["encode_ns"]) == (200, 47, 91)


def test_who_does_not_measure_tells_what_is_known() -> None:
    plain = timings_of(done(predict(), BatchRun(1, 1, 100)))
    none = timings_of(done(resolve()))

    assert (plain["user_ns"], plain["decode_ns"], plain["encode_ns"]) == (100, 7, 11)
    assert none == {"endpoint_total_ns": 4000, "in_flight": 2}


def test_what_a_batch_took_beside_the_policy_is_no_part_of_what_it_is() -> None:
    # Others cache what they tell of a batch by it.
    one, other = BatchRun(1, 8, 5, "s", decode_ns=1), BatchRun(1, 8, 5, "s", decode_ns=2)

    assert (one, hash(one)) == (other, hash(other))


# --- whole streams at random -----------------------------------------------------------

ENVS = st.sampled_from("abc")
REQUESTS: st.SearchStrategy[Callable[[str], FrameRequest]] = st.one_of(
    ENVS.map(lambda env: lambda request_id: resolve(request_id, env)),
    ENVS.map(lambda env: lambda request_id: predict(request_id, env)),
    ENVS.map(lambda env: lambda request_id: ForgetEpisodes(request_id, context(env), ("e",))),
    ENVS.map(lambda env: lambda request_id: CloseRoute(request_id, context(env))),
    st.lists(ENVS, max_size=4).map(lambda envs: lambda request_id: grouped(request_id, *envs)),
)


def envs_of(request: FrameRequest) -> Sequence[str]:
    if isinstance(request, GroupedPredict):
        return [group.context.route_id for group in request.groups if isinstance(group, Predict)]
    assert isinstance(request, RouteRequest)
    return [request.context.route_id]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(REQUESTS, max_size=15),
    st.lists(st.integers(0, 5), min_size=60, max_size=60),
    st.booleans(),
)
def test_each_frame_is_answered_once_and_each_adapter_s_in_order(
    makers: list[Callable[[str], FrameRequest]], choices: list[int], closes: bool
) -> None:
    stream, order = Stream("a", "b"), iter(choices)
    sent = [make(str(number)) for number, make in enumerate(makers)]

    for request in sent:
        stream.send(request)
        if next(order) % 2 and stream.working:
            stream.finish(next(order) % len(stream.working))
    if closes:
        stream.send(CloseModel("close"))
    while stream.working:
        stream.finish(next(order) % len(stream.working))

    answered = [response.request_id for response in stream.sent]
    assert sorted(answered) == sorted([*map(str, range(len(sent))), *(["close"] if closes else [])])
    assert not closes or answered[-1] == "close"
    by_adapter: dict[str, list[str]] = defaultdict(list)
    for request in sent:
        # Groups may have to wait for other adapters, after their turn.
        if not isinstance(request, GroupedPredict):
            by_adapter[envs_of(request)[0]].append(request.request_id)
    for ids in by_adapter.values():
        assert [request_id for request_id in answered if request_id in ids] == ids
