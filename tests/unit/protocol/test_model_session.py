from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.dialects.released.protocol import MODEL_RULES as RELEASED_RULES
from rlmesh_ray.errors import LocalProtocolError
from rlmesh_ray.protocol.messages import (
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
    Request,
    RouteClosed,
    RouteConfigured,
    RouteRequest,
)
from rlmesh_ray.protocol.model_session import (
    EDITION_2026_06_RULES,
    RESPONSE_TYPES,
    EpisodesForgotten,
    ForgetEpisodes,
    ModelRules,
    ModelSession,
    RouteState,
    SessionEvent,
    SessionRequest,
    SessionResponse,
)


def context(route: str, request_id: str) -> PredictContext:
    return PredictContext("s", route, request_id)


def configure(request_id: str, route: str = "a") -> ConfigureRoute:
    return ConfigureRoute(request_id, context(route, request_id), "contract")


def predict(request_id: str, route: str = "a") -> Predict:
    return Predict(request_id, context(route, request_id), b"")


def close_route(request_id: str, route: str = "a") -> CloseRoute:
    return CloseRoute(request_id, context(route, request_id))


def forget(request_id: str, route: str = "a") -> ForgetEpisodes:
    return ForgetEpisodes(request_id, context(route, request_id), ("e",))


def answer(request: RouteRequest) -> SessionResponse:
    if isinstance(request, ConfigureRoute):
        return RouteConfigured(request.request_id)
    if isinstance(request, Predict):
        return Predicted(request.request_id, request.context, b"")
    if isinstance(request, ForgetEpisodes):
        return EpisodesForgotten(request.request_id)
    return RouteClosed(request.request_id)


def configured(*routes: str, rules: ModelRules = EDITION_2026_06_RULES) -> ModelSession:
    session = ModelSession(rules)
    for route in routes or ("a",):
        request = configure(f"configure-{route}", route)
        session.receive(request)
        session.complete(request, answer(request))
    return session


AnyRouteRequest = ConfigureRoute | Predict | CloseRoute | ForgetEpisodes
KINDS: dict[type[RouteRequest], Callable[[str, str], AnyRouteRequest]] = {
    ConfigureRoute: configure,
    Predict: predict,
    ForgetEpisodes: forget,
    CloseRoute: close_route,
}
RULES = {"edition": EDITION_2026_06_RULES, "released": RELEASED_RULES}
KINDS_OF = {
    "edition": [ConfigureRoute, Predict, CloseRoute],
    "released": [ConfigureRoute, Predict, ForgetEpisodes, CloseRoute],
}
"""What each generation has messages for."""
EVERYTHING = [
    (name, kind) for name in RULES for kind in [*KINDS_OF[name], CloseModel, MalformedRequest]
]


def session_with(state: RouteState, rules: ModelRules = EDITION_2026_06_RULES) -> ModelSession:
    is_configured = state is RouteState.CONFIGURED
    return configured("a", rules=rules) if is_configured else ModelSession(rules)


def message(
    kind: type[Request], request_id: str, route: str = "a"
) -> SessionRequest | MalformedRequest:
    if kind is MalformedRequest:
        return MalformedRequest(request_id, "not a JoinRequest")
    if kind is CloseModel:
        return CloseModel(request_id)
    return KINDS[kind](request_id, route)  # type: ignore[index]


@pytest.mark.parametrize("name", RULES)
def test_the_tables_know_every_state_and_request(name: str) -> None:
    table = RULES[name].requests

    assert set(table) == set(RouteState)
    assert {kind for row in table.values() for kind in row} == set(KINDS_OF[name])
    assert set(RESPONSE_TYPES) == set(KINDS)


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in RULES for kind in KINDS])
@pytest.mark.parametrize("state", RouteState)
@pytest.mark.parametrize("succeeds", [True, False])
def test_each_request_moves_its_route_as_the_table_says(
    name: str, state: RouteState, kind: type[RouteRequest], succeeds: bool
) -> None:
    table, session = RULES[name].requests, session_with(state, RULES[name])
    request = KINDS[kind]("r", "a")
    output = session.receive(request)
    after = state

    if kind in table[state]:
        assert output == [request]
        failed = ModelFailed("r", ModelErrorCode.INTERNAL, "no", True)
        response = answer(request) if succeeds else failed
        assert session.complete(request, response) == [response]
        after = table[state][kind] if succeeds else state
    else:
        (refusal,) = output
        assert isinstance(refusal, ModelFailed)
        assert (refusal.request_id, refusal.code) == ("r", ModelErrorCode.NOT_CONFIGURED)
        assert refusal.is_recoverable
        assert RULES[name].remedy in refusal.message

    # A Predict shows the state of the route.
    (event,) = session.receive(predict("after"))
    assert isinstance(event, Predict) == (after is RouteState.CONFIGURED)


@pytest.mark.parametrize(("name", "late"), EVERYTHING)
@pytest.mark.parametrize("state", RouteState)
def test_what_comes_while_its_route_works_waits_or_is_refused_at_once(
    name: str, state: RouteState, late: type[Request]
) -> None:
    table = RULES[name].requests
    for working in table[state]:
        session = session_with(state, RULES[name])
        first = KINDS[working]("1", "a")  # type: ignore[index]  # all of them are route requests
        session.receive(first)

        at_once = session.receive(message(late, "2"))
        then = session.complete(first, answer(first))

        if late is MalformedRequest:
            assert [type(response) for response in at_once] == [ModelFailed]
            assert then == [answer(first)]
        elif late is CloseModel:
            assert at_once == []
            assert then == [answer(first), ModelClosed("2")]
        elif late in table[table[state][working]]:
            assert at_once == []
            assert then[0] == answer(first)
            assert isinstance(then[1], RouteRequest)
            assert [event.request_id for event in then[1:]] == ["2"]
        else:
            assert at_once == []
            assert [response.request_id for response in then] == ["1", "2"]
            assert isinstance(then[1], ModelFailed)
            assert then[1].code is ModelErrorCode.NOT_CONFIGURED


@pytest.mark.parametrize(("name", "late"), EVERYTHING)
@pytest.mark.parametrize("is_draining", [True, False])
@pytest.mark.parametrize("state", RouteState)
def test_nothing_may_follow_close_whether_or_not_it_has_been_answered(
    name: str, state: RouteState, is_draining: bool, late: type[Request]
) -> None:
    session = session_with(state, RULES[name])
    unfinished = configure("1", "b")
    if is_draining:
        session.receive(unfinished)
    session.receive(CloseModel("2"))

    output = session.receive(message(late, "3"))

    (refusal,) = output
    assert isinstance(refusal, ModelFailed)
    assert (refusal.request_id, refusal.code) == ("3", ModelErrorCode.CLOSED)
    assert not refusal.is_recoverable
    assert session.is_closed != is_draining
    if is_draining:
        drained = session.complete(unfinished, answer(unfinished))
        assert drained == [answer(unfinished), ModelClosed("2")]


@pytest.mark.parametrize("late", [*KINDS, CloseModel])
@pytest.mark.parametrize("route", ["a", "b"])
def test_an_id_that_is_outstanding_is_refused_on_every_route_and_for_every_kind(
    route: str, late: type[Request]
) -> None:
    session = configured("a", "b")
    first = predict("1", "a")
    session.receive(first)

    output = session.receive(message(late, "1", route))

    (refusal,) = output
    assert isinstance(refusal, ModelFailed)
    assert refusal.code is ModelErrorCode.INVALID_REQUEST
    assert refusal.is_recoverable
    assert session.num_outstanding == 1
    assert session.complete(first, answer(first)) == [answer(first)]


@pytest.mark.parametrize("state", RouteState)
@pytest.mark.parametrize("request_kind", KINDS)
@pytest.mark.parametrize("response_kind", KINDS)
def test_only_an_answer_of_its_own_kind_completes_a_request(
    state: RouteState, request_kind: type[RouteRequest], response_kind: type[RouteRequest]
) -> None:
    session = session_with(state, RELEASED_RULES)
    request = KINDS[request_kind]("1", "a")
    is_working = session.receive(request) == [request]
    response = answer(KINDS[response_kind]("1", "a"))

    if is_working and response_kind is request_kind:
        assert session.complete(request, response) == [response]
        return
    reason = "does not answer" if is_working else "not being executed"
    with pytest.raises(LocalProtocolError, match=reason):
        session.complete(request, response)


def test_routes_that_are_gone_leave_nothing_behind() -> None:
    session = ModelSession()
    for number in range(3):
        for make in (predict, configure, close_route):
            request = make(f"{make.__name__}{number}", str(number))
            if session.receive(request) == [request]:
                session.complete(request, answer(request))

    assert session.num_routes == 0


def test_a_predict_on_an_unconfigured_route_is_not_configured_and_recoverable() -> None:
    output = ModelSession().receive(predict("1"))

    (response,) = output
    assert isinstance(response, ModelFailed)
    assert response.code is ModelErrorCode.NOT_CONFIGURED
    assert response.is_recoverable


def test_a_closed_route_is_unconfigured_again() -> None:
    session = configured()
    request = close_route("1")
    session.receive(request)
    session.complete(request, answer(request))

    (response,) = session.receive(predict("2"))

    assert isinstance(response, ModelFailed)
    assert response.code is ModelErrorCode.NOT_CONFIGURED


def test_a_route_that_failed_to_configure_stays_unconfigured() -> None:
    session = ModelSession()
    request = configure("1")
    session.receive(request)
    session.complete(request, ModelFailed("1", ModelErrorCode.INVALID_REQUEST, "no", True))

    (response,) = session.receive(predict("2"))

    assert isinstance(response, ModelFailed)


def test_requests_of_one_route_are_worked_on_one_at_a_time_in_order() -> None:
    session = configured()
    first, second = predict("1"), predict("2")

    assert session.receive(first) == [first]
    assert session.receive(second) == []
    assert session.complete(first, answer(first)) == [answer(first), second]


def test_routes_do_not_wait_for_each_other() -> None:
    session = configured("a", "b")
    on_a, on_b = predict("1", "a"), predict("2", "b")

    session.receive(on_a)

    assert session.receive(on_b) == [on_b]
    assert session.complete(on_b, answer(on_b)) == [answer(on_b)]


def test_what_waits_behind_a_close_route_is_refused_in_its_turn() -> None:
    session = configured()
    closing, late = close_route("1"), predict("2")
    session.receive(closing)
    session.receive(late)

    output = session.complete(closing, answer(closing))

    assert [response.request_id for response in output] == ["1", "2"]
    assert isinstance(output[1], ModelFailed)


def test_close_is_answered_after_everything_outstanding() -> None:
    session = configured("a", "b")
    on_a, on_b = predict("1", "a"), predict("2", "b")
    session.receive(on_a)
    session.receive(on_b)

    assert session.receive(CloseModel("3")) == []
    assert session.complete(on_b, answer(on_b)) == [answer(on_b)]
    assert session.complete(on_a, answer(on_a)) == [answer(on_a), ModelClosed("3")]
    assert session.is_closed


def test_close_without_anything_outstanding_is_answered_at_once() -> None:
    session = configured()

    assert session.receive(CloseModel("1")) == [ModelClosed("1")]


def test_nothing_may_follow_close() -> None:
    session = configured()
    session.receive(CloseModel("1"))

    (response,) = session.receive(predict("2"))

    assert isinstance(response, ModelFailed)
    assert response.code is ModelErrorCode.CLOSED
    assert not response.is_recoverable


def test_an_outstanding_id_cannot_be_used_again() -> None:
    session = configured()
    session.receive(predict("1"))

    (response,) = session.receive(predict("1"))

    assert isinstance(response, ModelFailed)
    assert response.code is ModelErrorCode.INVALID_REQUEST
    assert session.num_outstanding == 1


def test_an_unreadable_frame_is_answered() -> None:
    (response,) = ModelSession().receive(MalformedRequest("1", "not a JoinRequest"))

    assert isinstance(response, ModelFailed)
    assert response.message == "not a JoinRequest"
    assert response.is_recoverable


def test_completing_what_is_not_being_worked_on_is_the_shells_fault() -> None:
    session = configured()

    with pytest.raises(LocalProtocolError, match="not being executed"):
        session.complete(predict("1"), RouteClosed("1"))


def test_an_answer_of_another_kind_is_the_hosts_fault() -> None:
    session = configured()
    request = predict("1")
    session.receive(request)

    with pytest.raises(LocalProtocolError, match="does not answer Predict"):
        session.complete(request, RouteClosed("1"))


ACTIONS = st.lists(
    st.tuples(st.sampled_from([configure, predict, close_route]), st.sampled_from("abc")),
    max_size=30,
)


@given(ACTIONS, st.randoms(use_true_random=False))
def test_every_request_is_answered_once_and_in_order_on_its_route(actions, random) -> None:  # type: ignore[no-untyped-def]
    session = ModelSession()
    sent: dict[str, list[str]] = {}
    answered: dict[str, list[str]] = {}
    route_of: dict[str, str] = {}
    ready: list[RouteRequest] = []

    def follow(following: list[SessionEvent]) -> None:
        for event in following:
            if isinstance(event, RouteRequest):
                ready.append(event)
                continue
            answered.setdefault(route_of[event.request_id], []).append(event.request_id)

    for number, (make, route) in enumerate(actions):
        request = make(str(number), route)
        route_of[str(number)] = route
        sent.setdefault(route, []).append(str(number))
        follow(session.receive(request))
        while ready and random.random() < 0.5:
            done = ready.pop(random.randrange(len(ready)))
            follow(session.complete(done, answer(done)))
    while ready:
        done = ready.pop(random.randrange(len(ready)))
        follow(session.complete(done, answer(done)))

    assert answered == sent
    assert session.num_outstanding == 0
