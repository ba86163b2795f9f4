"""The translation of model streams of rlmesh-wire-v1, with the session that it is for."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh_ray.dialects.released.protocol import (
    MODEL_RULES,
    AdapterPredict,
    AdapterPredicted,
    AdapterResolved,
    AnyAdapterRequest,
    AnyAdapterResponse,
    EpisodesForgotten,
    GroupedPredict,
    GroupedPredicted,
    ModelTimings,
    ResolveAdapter,
    RowEpisode,
)
from rlmesh_ray.dialects.released.server.model_dialect import ModelTranslation, PendingFrame
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
    TimedBatchRun,
)
from rlmesh_ray.protocol.model_session import (
    ForgetEpisodes,
    ModelSession,
    ModelSessionOutput,
    SessionResponse,
)

SPEC = "env spec"


def context(env: str = "a", request_id: str = "q") -> PredictContext:
    return PredictContext("session", env, request_id)


def resolve(request_id: str = "r", env: str = "a", **other: Any) -> ResolveAdapter:
    return ResolveAdapter(request_id, context(env), **{"env_spec": SPEC, **other})


def predict(request_id: str = "r", env: str = "a", *episodes: str) -> AdapterPredict:
    named = tuple(RowEpisode(episode, seed=1) for episode in episodes or ("e",))
    return AdapterPredict(request_id, context(env, request_id), b"observation", named, step=4)


def grouped(request_id: str, *envs: str) -> GroupedPredict:
    return GroupedPredict(request_id, tuple(predict("", env) for env in envs))


def failed(request: RouteRequest) -> ModelFailed:
    return ModelFailed(request.request_id, ModelErrorCode.INTERNAL, "no", True, "trace")


def done(request: RouteRequest, run: BatchRun | None = None) -> SessionResponse:
    """Return what a host would answer: its action tells the route."""
    match request:
        case ConfigureRoute():
            return RouteConfigured(request.request_id)
        case Predict():
            action = request.context.route_id.encode()
            return Predicted(request.request_id, request.context, action, run, 30)
        case ForgetEpisodes():
            return EpisodesForgotten(request.request_id)
        case _:
            return RouteClosed(request.request_id)


class Stream:
    """A stream whose host does what the test tells it, when it tells it."""

    def __init__(self, *resolved: str) -> None:
        self.adapters = ModelTranslation()
        self.session = ModelSession(MODEL_RULES)
        self.working: list[RouteRequest] = []
        self.sent: list[AnyAdapterResponse] = []
        for env in resolved:
            self.send(resolve("resolve", env))
            self.finish()
        self.sent.clear()

    def send(self, request: AnyAdapterRequest | MalformedRequest) -> None:
        for one in self.adapters.receive(request, 0, 0):
            self._follow(self.session.receive(one))

    def finish(
        self, which: int = 0, answer: Callable[[RouteRequest], SessionResponse] = done
    ) -> RouteRequest:
        """Have the host answer one of the requests that it works on."""
        request = self.working.pop(which)
        self._follow(self.session.complete(request, answer(request)))
        return request

    def _follow(self, output: ModelSessionOutput) -> None:
        for response in output.responses:
            exchange = self.adapters.answer(response)
            if exchange is not None:
                self.sent.append(exchange.response())
        self.working += output.ready


def test_an_adapter_is_a_route_known_by_its_environment() -> None:
    stream = Stream()

    stream.send(resolve("r1", execution_horizon=4, delivers_history=True, edition="2026.06"))
    (request,) = stream.working
    stream.finish()

    assert isinstance(request, ConfigureRoute)
    assert (request.context.route_id, request.contract) == ("a", SPEC)
    assert request.horizon == 4
    # A policy of one action has no chunk, and former observations are not asked for.
    assert stream.sent == [AdapterResolved("r1", native_chunk=None, history_keys=())]


def test_a_prediction_goes_by_episodes_and_comes_back_with_its_context() -> None:
    stream = Stream("a")
    asked = predict("r1", "a", "e", "f")

    stream.send(asked)
    (request,) = stream.working
    stream.finish()

    assert isinstance(request, Predict)
    slots = (PredictSlot(-1, "e", 4, False), PredictSlot(-1, "f", 4, False))
    assert request.context == PredictContext("session", "a", "r1", slots)
    assert request.observation == b"observation"
    assert stream.sent == [AdapterPredicted("r1", asked.context, (b"a",))]


def test_a_policy_s_chunks_are_the_list_of_actions() -> None:
    def chunked(request: RouteRequest) -> SessionResponse:
        if isinstance(request, ConfigureRoute):
            return RouteConfigured(request.request_id, horizon=3)
        return Predicted(request.request_id, request.context, b"1", later=(b"2", b"3"))

    stream = Stream()
    stream.send(resolve("r1"))
    request = stream.finish(answer=chunked)
    asked = predict("r2")
    stream.send(asked)
    stream.finish(answer=chunked)

    assert isinstance(request, ConfigureRoute)
    assert request.horizon == 1
    assert stream.sent == [
        AdapterResolved("r1", native_chunk=3, history_keys=()),
        AdapterPredicted("r2", asked.context, (b"1", b"2", b"3")),
    ]


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
    ("request_", "reason"),
    [
        (resolve(env=""), "no env_id"),
        (resolve(env_spec=None), "no env_spec"),
        (resolve(edition="2099.01"), "'2099.01'; this is 2026.06"),
        (predict("r", ""), "no env_id"),
        (GroupedPredict("r", ()), "no groups"),
        (MalformedRequest("r", "nonsense"), "nonsense"),
    ],
)
def test_what_makes_no_sense_is_refused_under_its_own_id(
    request_: AnyAdapterRequest | MalformedRequest, reason: str
) -> None:
    stream = Stream("a")

    stream.send(request_)

    (refusal,) = stream.sent
    assert isinstance(refusal, ModelFailed)
    assert (refusal.request_id, refusal.code) == ("r", ModelErrorCode.INVALID_REQUEST)
    assert refusal.is_recoverable
    assert reason in refusal.message
    assert stream.working == []


@pytest.mark.parametrize("edition", ["", "2026.06", "2026.06-0.1.0-rc.5"])
def test_an_adapter_is_resolved_in_the_edition_that_is_spoken_here(edition: str) -> None:
    stream = Stream()

    stream.send(resolve(edition=edition))

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

    assert [(r.request_id, r.actions) for r in stream.sent if isinstance(r, AdapterPredicted)] == [
        ("same", (b"b",)),
        ("same", (b"a",)),
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
        AdapterPredicted("", context("b", ""), (b"b",)),
        AdapterPredicted("", context("c", ""), (b"c",)),
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
    refusals, stream.sent = stream.sent, []
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
    assert stream.adapters.num_in_flight == 2
    stream.finish(1)
    assert stream.adapters.num_in_flight == 2
    stream.finish(0)
    stream.finish(0)

    assert stream.adapters.num_in_flight == 0


# --- timings ---------------------------------------------------------------------------


def timings_of(request: AnyAdapterRequest, *runs: BatchRun | None) -> ModelTimings:
    adapters = ModelTranslation()
    asked = adapters.receive(request, 1000, 7)
    exchange: PendingFrame | None = None
    for one, run in zip(asked, runs, strict=True):
        assert isinstance(one, RouteRequest)
        exchange = adapters.answer(done(one, run))
    assert exchange is not None
    return exchange.timings(ended_ns=5000, encode_ns=11, in_flight=2, held_episodes=3)


def test_a_prediction_tells_where_its_time_went() -> None:
    run = TimedBatchRun(1, 8, 100, "server", decode_ns=20, encode_ns=40)

    assert timings_of(predict(), run) == ModelTimings(
        endpoint_total_ns=4000,
        decode_ns=27,
        user_ns=100,
        encode_ns=51,
        queue_ns=30,
        in_flight=2,
        held_episodes=3,
    )


def test_groups_that_shared_a_batch_share_what_it_took() -> None:
    shared = TimedBatchRun(1, 8, 100, "server", decode_ns=20, encode_ns=40)
    other = TimedBatchRun(1, 8, 100, "server", decode_ns=20, encode_ns=40)

    together = timings_of(grouped("r", "a", "b", "c"), shared, other, shared)

    assert (together.user_ns, together.decode_ns, together.encode_ns) == (200, 47, 91)


def test_who_does_not_measure_tells_what_is_known() -> None:
    plain = timings_of(predict(), BatchRun(1, 1, 100))
    none = timings_of(resolve(), None)

    assert (plain.user_ns, plain.decode_ns, plain.encode_ns) == (100, 7, 11)
    assert none == ModelTimings(endpoint_total_ns=4000, in_flight=2)


def test_what_a_batch_took_beside_the_policy_is_no_part_of_what_it_is() -> None:
    # Others cache what they tell of a batch by it.
    one, other = TimedBatchRun(1, 8, 5, "s", decode_ns=1), TimedBatchRun(1, 8, 5, "s", decode_ns=2)

    assert (one, hash(one)) == (other, hash(other))


# --- whole streams at random -----------------------------------------------------------

ENVS = st.sampled_from("abc")
REQUESTS: st.SearchStrategy[Callable[[str], AnyAdapterRequest]] = st.one_of(
    ENVS.map(lambda env: lambda request_id: resolve(request_id, env)),
    ENVS.map(lambda env: lambda request_id: predict(request_id, env)),
    ENVS.map(lambda env: lambda request_id: ForgetEpisodes(request_id, context(env), ("e",))),
    ENVS.map(lambda env: lambda request_id: CloseRoute(request_id, context(env))),
    st.lists(ENVS, max_size=4).map(lambda envs: lambda request_id: grouped(request_id, *envs)),
)


def envs_of(request: AnyAdapterRequest) -> Sequence[str]:
    if isinstance(request, GroupedPredict):
        return [group.context.route_id for group in request.groups]
    assert not isinstance(request, CloseModel)
    return [request.context.route_id]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(REQUESTS, max_size=15),
    st.lists(st.integers(0, 5), min_size=60, max_size=60),
    st.booleans(),
)
def test_each_frame_is_answered_once_and_each_adapter_s_in_order(
    makers: list[Callable[[str], AnyAdapterRequest]], choices: list[int], closes: bool
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
    assert stream.adapters.num_in_flight == 0
    by_adapter: dict[str, list[str]] = defaultdict(list)
    for request in sent:
        # Groups may have to wait for other adapters, after their turn.
        if not isinstance(request, GroupedPredict):
            by_adapter[envs_of(request)[0]].append(request.request_id)
    for ids in by_adapter.values():
        assert [request_id for request_id in answered if request_id in ids] == ids
