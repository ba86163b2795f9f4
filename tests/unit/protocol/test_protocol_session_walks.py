"""Whole sessions at random, held against what the edition says of them."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rlmesh_ray.errors import LocalProtocolError
from rlmesh_ray.protocol.env_session import (
    RENDER_FAILURES,
    EnvOutcome,
    Failure,
    FailureKind,
    RenderOutcome,
    ResetOutcome,
    SessionState,
    StepOutcome,
)
from rlmesh_ray.protocol.messages import (
    Close,
    CloseModel,
    CloseRoute,
    ConfigureRoute,
    EnvRequest,
    MalformedRequest,
    ModelClosed,
    ModelErrorCode,
    ModelFailed,
    Predict,
    PredictContext,
    Predicted,
    Render,
    Reset,
    RouteClosed,
    RouteConfigured,
    RouteRequest,
    Step,
)
from rlmesh_ray.protocol.model_session import ModelSession, SessionEvent, SessionResponse
from tests.reference_session import EnvEffect, EnvFailure, ReferenceSession, SimulatedStep
from tests.unit.protocol.counted_session import CountedSession

NUM_LANES = 3
FEW = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
MANY = settings(FEW, max_examples=2000, stateful_step_count=60)


# --- env sessions ----------------------------------------------------------------------

LANES = st.integers(-1, NUM_LANES)
SEEDS = st.integers(-(2**63), 2**63 - 1)
FLAGS = st.lists(st.booleans(), min_size=NUM_LANES, max_size=NUM_LANES).map(tuple)
TROUBLES = {
    FailureKind.TIMEOUT: EnvFailure.LOST,
    FailureKind.CRASHED: EnvFailure.LOST,
    FailureKind.RAISED: EnvFailure.LOST,
    FailureKind.BAD_ACTION: EnvFailure.NON_CONFORMING,
    FailureKind.BAD_OBSERVATION: EnvFailure.NON_CONFORMING,
    FailureKind.BAD_REQUEST: EnvFailure.REFUSED,
}


def some(values: st.SearchStrategy[int], full: int = NUM_LANES) -> Any:
    """Draw nothing, one entry a lane, or another number of them."""
    return st.one_of(
        st.just(()),
        st.lists(values, min_size=full, max_size=full).map(tuple),
        st.lists(values, max_size=full + 1).map(tuple),
    )


def resets() -> st.SearchStrategy[Reset]:
    """Draw a Reset: mostly plain, else with seeds and indices that fit or do not."""
    sound = st.lists(st.integers(0, NUM_LANES - 1), unique=True).flatmap(
        lambda lanes: st.builds(
            Reset,
            st.just(""),
            seeds=some(SEEDS, len(lanes) or NUM_LANES),
            env_indices=st.just(tuple(lanes)),
        )
    )
    wild = st.builds(Reset, st.just(""), seeds=some(SEEDS), env_indices=some(LANES))
    return st.one_of(st.just(Reset("")), sound, wild)


REQUESTS = st.one_of(
    resets(),
    st.just(Step("", b"")),
    st.just(Step("", b"")),
    st.builds(Step, st.just(""), st.binary(max_size=2), env_indices=some(LANES)),
    st.just(Render("")),
    st.just(MalformedRequest("", "no")),
)
STEPPED = st.builds(
    SimulatedStep,
    st.lists(st.floats(-9, 9), min_size=NUM_LANES, max_size=NUM_LANES).map(tuple),
    FLAGS,
    FLAGS,
)
FAILURES = st.one_of(*[st.none()] * 8, st.sampled_from(list(TROUBLES)))


def outcome_of(request: EnvRequest, stepped: SimulatedStep) -> EnvOutcome:
    if isinstance(request, Reset):
        return ResetOutcome(b"first", {})
    if isinstance(request, Render):
        return RenderOutcome(b"png")
    return StepOutcome(
        b"next", stepped.rewards, bytes(stepped.terminated), bytes(stepped.truncated), {}
    )


class EnvWalk(RuleBasedStateMachine):
    """Any requests, any outcomes."""

    def __init__(self) -> None:
        super().__init__()
        ids = map(str, itertools.count())
        self._session = CountedSession(NUM_LANES, lambda: f"episode-{next(ids)}")
        self._reference = ReferenceSession(NUM_LANES)
        self._clock = itertools.count(10, 10)
        self._request_ids = map(str, itertools.count())

    @rule(request=REQUESTS, stepped=STEPPED, failure=FAILURES)
    def ask(
        self,
        request: EnvRequest | MalformedRequest,
        stepped: SimulatedStep,
        failure: FailureKind | None,
    ) -> None:
        self._ask(request, stepped, failure)

    @rule(stepped=STEPPED, is_meant=st.sampled_from([True] + 7 * [False]))
    def close(self, stepped: SimulatedStep, is_meant: bool) -> None:
        if is_meant or self._reference.is_abandoned:
            self._ask(Close(""), stepped, None)

    @rule(is_meant=st.sampled_from([True] + 15 * [False]))
    def lose_the_stream(self, is_meant: bool) -> None:
        if is_meant:
            self._session.interrupt(next(self._clock))
            assert self._session.state is SessionState.CLOSED
            assert self._session.tracker.episode_ids == ("",) * NUM_LANES
            self.__init__()  # type: ignore[misc]

    @precondition(lambda self: self._reference.is_closed)
    @rule()
    def begin_anew(self) -> None:
        self.__init__()  # type: ignore[misc]

    def _ask(
        self,
        template: EnvRequest | MalformedRequest,
        stepped: SimulatedStep,
        failure: FailureKind | None,
    ) -> None:
        request = _with_id(template, next(self._request_ids))
        response = self._session.receive(request, next(self._clock))
        reaches_host = self._reference.admits(request) and not isinstance(request, Close)
        assert (response is None) == reaches_host
        deed: EnvEffect = None
        if response is None:
            assert not isinstance(request, MalformedRequest)
            outcome = Failure(failure, "why") if failure else outcome_of(request, stepped)
            with pytest.raises(LocalProtocolError):
                self._session.receive(Close("early"), 0)
            response = self._session.complete(outcome, next(self._clock))
            is_harmless = isinstance(request, Render) and failure in RENDER_FAILURES
            deed = EnvFailure.REFUSED if is_harmless else TROUBLES[failure] if failure else stepped
        self._reference.judge(request, response, deed)
        with pytest.raises(LocalProtocolError):
            self._session.complete(RenderOutcome(None), 0)

    @invariant()
    def stands_where_the_text_says(self) -> None:
        reference = self._reference
        if reference.is_closed:
            expected = SessionState.CLOSED
        elif reference.is_abandoned:
            expected = SessionState.ABANDONED
        else:
            expected = SessionState.READY if reference.is_started else SessionState.AWAIT_RESET
        assert self._session.state is expected
        assert self._session.tracker.episode_ids == reference.episode_ids


def _with_id(request: Any, request_id: str) -> Any:
    fields = {name: getattr(request, name) for name in type(request).__dataclass_fields__}
    return type(request)(**{**fields, "request_id": request_id})


# --- model sessions --------------------------------------------------------------------

MAKERS: dict[str, Callable[[str, PredictContext], Any]] = {
    "configure": lambda request_id, context: ConfigureRoute(request_id, context, "contract"),
    "predict": lambda request_id, context: Predict(request_id, context, b""),
    "close": CloseRoute,
}


class ModelWalk(RuleBasedStateMachine):
    """Any requests on three routes, finished in any order, well or badly.

    What must hold is read off the whole history: what each route was sent, in order, and which
    of it the policy did.
    """

    def __init__(self) -> None:
        super().__init__()
        self._session = ModelSession()
        self._sent: dict[str, list[str]] = {}
        self._kinds: dict[str, str] = {}
        self._answers: dict[str, list[SessionResponse]] = {}
        self._order: list[str] = []
        self._working: list[RouteRequest] = []
        self._succeeded: dict[str, bool] = {}
        self._close_id: str | None = None
        self._numbers = itertools.count()

    @rule(kind=st.sampled_from(sorted(MAKERS)), route=st.sampled_from("abc"))
    def send(self, kind: str, route: str) -> None:
        request_id = str(next(self._numbers))
        output = self._session.receive(MAKERS[kind](request_id, PredictContext("s", route, "x")))
        if self._close_id is not None:
            self._assert_refused(output, request_id, ModelErrorCode.CLOSED)
            return
        self._sent.setdefault(route, []).append(request_id)
        self._kinds[request_id] = kind
        self._follow(output)

    @precondition(lambda self: self._outstanding() and self._close_id is None)
    @rule(data=st.data(), kind=st.sampled_from(sorted(MAKERS)), route=st.sampled_from("abc"))
    def send_an_outstanding_id(self, data: st.DataObject, kind: str, route: str) -> None:
        request_id = data.draw(st.sampled_from(self._outstanding()))
        output = self._session.receive(MAKERS[kind](request_id, PredictContext("s", route, "x")))
        self._assert_refused(output, request_id, ModelErrorCode.INVALID_REQUEST)

    @rule()
    def send_nonsense(self) -> None:
        request_id = str(next(self._numbers))
        output = self._session.receive(MalformedRequest(request_id, "no"))
        is_open = self._close_id is None
        code = ModelErrorCode.INVALID_REQUEST if is_open else ModelErrorCode.CLOSED
        self._assert_refused(output, request_id, code)

    @precondition(lambda self: self._working)
    @rule(data=st.data(), succeeds=st.booleans())
    def finish(self, data: st.DataObject, succeeds: bool) -> None:
        index = data.draw(st.integers(0, len(self._working) - 1))
        request = self._working.pop(index)
        self._succeeded[request.request_id] = succeeds
        self._follow(self._session.complete(request, _result(request, succeeds)))

    @precondition(lambda self: self._close_id is None)
    @rule(is_meant=st.sampled_from([True] + 7 * [False]))
    def close(self, is_meant: bool) -> None:
        if not is_meant:
            return
        self._close_id = str(next(self._numbers))
        self._follow(self._session.receive(CloseModel(self._close_id)))

    @precondition(lambda self: self._session.is_closed)
    @rule()
    def begin_anew(self) -> None:
        self.__init__()  # type: ignore[misc]

    def _outstanding(self) -> list[str]:
        return [request_id for request_id in self._kinds if request_id not in self._answers]

    def _follow(self, following: list[SessionEvent]) -> None:
        for event in following:
            if isinstance(event, RouteRequest):
                self._working.append(event)
                continue
            assert event.request_id not in self._answers, "answered twice"
            self._answers[event.request_id] = [event]
            self._order.append(event.request_id)

    def _assert_refused(
        self, following: list[SessionEvent], request_id: str, code: ModelErrorCode
    ) -> None:
        (response,) = following
        assert isinstance(response, ModelFailed)
        assert (response.request_id, response.code) == (request_id, code)
        assert response.is_recoverable == (code is not ModelErrorCode.CLOSED)

    @invariant()
    def each_route_is_served_in_its_order(self) -> None:
        working = {request.request_id for request in self._working}
        for sent in self._sent.values():
            answered = [request_id for request_id in self._order if request_id in set(sent)]
            assert answered == sent[: len(answered)]
            # The next one is being worked on, and nothing behind it.
            assert [request_id for request_id in sent if request_id in working] == (
                sent[len(answered) : len(answered) + 1]
            )
        assert self._session.num_outstanding == len(self._outstanding())

    @invariant()
    def each_answer_follows_from_what_its_route_was_sent_before(self) -> None:
        for sent in self._sent.values():
            is_configured = False
            for request_id in sent:
                if request_id not in self._answers:
                    break
                (response,) = self._answers[request_id]
                kind = self._kinds[request_id]
                if not is_configured and kind != "configure":
                    assert isinstance(response, ModelFailed)
                    assert response.code is ModelErrorCode.NOT_CONFIGURED
                    assert response.is_recoverable
                elif self._succeeded[request_id]:
                    assert not isinstance(response, ModelFailed)
                    is_configured = kind != "close"

    @invariant()
    def close_is_answered_last(self) -> None:
        is_due = self._close_id is not None and not self._outstanding()
        assert self._session.is_closed == is_due
        assert (self._close_id in self._answers) == is_due
        if is_due:
            assert self._order[-1] == self._close_id
            assert self._answers[self._order[-1]] == [ModelClosed(self._order[-1])]


def _result(request: RouteRequest, succeeds: bool) -> SessionResponse:
    if not succeeds:
        return ModelFailed(request.request_id, ModelErrorCode.INTERNAL, "no", True)
    if isinstance(request, Predict):
        return Predicted(request.request_id, request.context, b"")
    if isinstance(request, ConfigureRoute):
        return RouteConfigured(request.request_id)
    return RouteClosed(request.request_id)


@pytest.mark.parametrize("walk", [EnvWalk, ModelWalk])
def test_a_few_random_sessions_are_as_the_text_says(walk: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(walk, settings=FEW)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("walk", [EnvWalk, ModelWalk])
def test_many_random_sessions_are_as_the_text_says(walk: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(walk, settings=MANY)
