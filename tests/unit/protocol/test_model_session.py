import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh_ray.errors import LocalProtocolError
from rlmesh_ray.protocol.messages import (
    CloseModel,
    CloseRoute,
    ConfigureRoute,
    ModelClosed,
    ModelErrorCode,
    ModelFailed,
    ModelResponse,
    Predict,
    PredictContext,
    Predicted,
    RouteClosed,
    RouteConfigured,
    RouteRequest,
    Unreadable,
)
from rlmesh_ray.protocol.model_session import ModelSession, Todo


def context(route: str, request_id: str) -> PredictContext:
    return PredictContext("s", route, request_id)


def configure(request_id: str, route: str = "a") -> ConfigureRoute:
    return ConfigureRoute(request_id, context(route, request_id), "contract")


def predict(request_id: str, route: str = "a") -> Predict:
    return Predict(request_id, context(route, request_id), b"")


def close_route(request_id: str, route: str = "a") -> CloseRoute:
    return CloseRoute(request_id, context(route, request_id))


def answer(request: RouteRequest) -> ModelResponse:
    if isinstance(request, ConfigureRoute):
        return RouteConfigured(request.request_id)
    if isinstance(request, Predict):
        return Predicted(request.request_id, request.context, b"")
    return RouteClosed(request.request_id)


def configured(*routes: str) -> ModelSession:
    session = ModelSession()
    for route in routes or ("a",):
        request = configure(f"configure-{route}", route)
        session.receive(request)
        session.complete(request, answer(request))
    return session


def test_a_predict_on_an_unconfigured_route_is_not_configured_and_recoverable() -> None:
    todo = ModelSession().receive(predict("1"))

    (response,) = todo.responses
    assert isinstance(response, ModelFailed)
    assert response.code is ModelErrorCode.NOT_CONFIGURED
    assert response.is_recoverable


def test_a_closed_route_is_unconfigured_again() -> None:
    session = configured()
    request = close_route("1")
    session.receive(request)
    session.complete(request, answer(request))

    (response,) = session.receive(predict("2")).responses

    assert isinstance(response, ModelFailed)
    assert response.code is ModelErrorCode.NOT_CONFIGURED


def test_a_route_that_failed_to_configure_stays_unconfigured() -> None:
    session = ModelSession()
    request = configure("1")
    session.receive(request)
    session.complete(request, ModelFailed("1", ModelErrorCode.INVALID_REQUEST, "no", True))

    (response,) = session.receive(predict("2")).responses

    assert isinstance(response, ModelFailed)


def test_requests_of_one_route_are_worked_on_one_at_a_time_in_order() -> None:
    session = configured()
    first, second = predict("1"), predict("2")

    assert session.receive(first) == Todo(ready=[first])
    assert session.receive(second) == Todo()
    assert session.complete(first, answer(first)) == Todo([answer(first)], [second])


def test_routes_do_not_wait_for_each_other() -> None:
    session = configured("a", "b")
    on_a, on_b = predict("1", "a"), predict("2", "b")

    session.receive(on_a)

    assert session.receive(on_b).ready == [on_b]
    assert session.complete(on_b, answer(on_b)).responses == [answer(on_b)]


def test_what_waits_behind_a_close_route_is_refused_in_its_turn() -> None:
    session = configured()
    closing, late = close_route("1"), predict("2")
    session.receive(closing)
    session.receive(late)

    todo = session.complete(closing, answer(closing))

    assert [response.request_id for response in todo.responses] == ["1", "2"]
    assert isinstance(todo.responses[1], ModelFailed)


def test_close_is_answered_after_everything_outstanding() -> None:
    session = configured("a", "b")
    on_a, on_b = predict("1", "a"), predict("2", "b")
    session.receive(on_a)
    session.receive(on_b)

    assert session.receive(CloseModel("3")) == Todo()
    assert session.complete(on_b, answer(on_b)).responses == [answer(on_b)]
    assert session.complete(on_a, answer(on_a)).responses == [answer(on_a), ModelClosed("3")]
    assert session.is_closed


def test_close_without_anything_outstanding_is_answered_at_once() -> None:
    session = configured()

    assert session.receive(CloseModel("1")).responses == [ModelClosed("1")]


def test_nothing_may_follow_close() -> None:
    session = configured()
    session.receive(CloseModel("1"))

    (response,) = session.receive(predict("2")).responses

    assert isinstance(response, ModelFailed)
    assert response.code is ModelErrorCode.CLOSED
    assert not response.is_recoverable


def test_an_outstanding_id_cannot_be_used_again() -> None:
    session = configured()
    session.receive(predict("1"))

    (response,) = session.receive(predict("1")).responses

    assert isinstance(response, ModelFailed)
    assert response.code is ModelErrorCode.INVALID_REQUEST
    assert session.num_outstanding == 1


def test_an_unreadable_frame_is_answered() -> None:
    (response,) = ModelSession().receive(Unreadable("1", "not a JoinRequest")).responses

    assert isinstance(response, ModelFailed)
    assert response.message == "not a JoinRequest"
    assert response.is_recoverable


def test_completing_what_is_not_being_worked_on_is_the_shells_fault() -> None:
    session = configured()

    with pytest.raises(LocalProtocolError, match="not being worked on"):
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
@settings(deadline=None, derandomize=True, max_examples=200)
def test_every_request_is_answered_once_and_in_order_on_its_route(actions, random) -> None:  # type: ignore[no-untyped-def]
    session = ModelSession()
    sent: dict[str, list[str]] = {}
    answered: dict[str, list[str]] = {}
    route_of: dict[str, str] = {}
    ready: list[RouteRequest] = []

    def follow(todo: Todo) -> None:
        ready.extend(todo.ready)
        for response in todo.responses:
            answered.setdefault(route_of[response.request_id], []).append(response.request_id)

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
