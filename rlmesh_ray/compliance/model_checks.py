"""Checks of the model workflow: routes, predictions, order, errors, Close."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from rlmesh_ray.compliance.action_cases import conforming
from rlmesh_ray.compliance.checks import ClauseBroken, ClauseNotObservable, holds, require
from rlmesh_ray.compliance.subjects import (
    END_REMEDY,
    ROUTE,
    ModelSubject,
    RawModelSession,
    expect,
    require_one_response_each,
    slot,
)
from rlmesh_ray.protocol.capabilities import CONCURRENT_PREDICT
from rlmesh_ray.protocol.messages import (
    CloseModel,
    ModelClosed,
    ModelErrorCode,
    ModelFailed,
    ModelRequest,
    ModelResponse,
    Predict,
    Predicted,
    RouteClosed,
    RouteConfigured,
)
from rlmesh_ray.spaces.batch import Column, Leaf, coerce, leaves
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.gym_conversion import to_gymnasium
from rlmesh_ray.spaces.spec import BoxSpec, SpaceSpec, TextSpec, TupleSpec

_NUM_CANDIDATES = 16
# A stochastic policy must not be mistaken for a wrong order: with two equally likely actions that
# happens once in 20,000 checks.
_REPEATS = 6
# Above the rounding differences between batch sizes, below the difference of two actions.
_TOLERANCE = 1e-3
_UNSEEN = "so that the order of its actions cannot be seen"

Actions = list[Column]


_OTHER_ROUTE = "check-route-2"
_PIPELINED = 20


@holds("route.configure-first")
def predict_needs_a_configured_route(subject: ModelSubject) -> None:
    when = "on a route that is not open"
    with subject.session() as session:
        session.must_be_unconfigured(session.predict_request(), when)
    with subject.acting() as session:
        session.configure(_OTHER_ROUTE)
        if session.must_be_unconfigured(session.predict_request(), when).is_recoverable:
            session.configure()
            session.predict()


@holds("route.contract-fixed")
def a_route_keeps_its_contract(subject: ModelSubject) -> None:
    """While another route opens and closes, with another contract if the model accepts one.

    The text does not define whether an open route may be configured again: a server may refuse it.
    With the same contract the route must go on in either case.
    """
    contract = subject.wide_contract
    with _beside_another_contract(subject) as session:
        session.actions(session.predict(), contract.num_envs)
        session.ask(session.close_route_request(_OTHER_ROUTE))
        session.actions(session.predict(), contract.num_envs)
        again = session.ask(session.configure_request(ROUTE, contract))
        if isinstance(again, ModelFailed) and not again.is_recoverable:
            return  # refused for good
        name = type(again).__name__
        is_answer = isinstance(again, RouteConfigured | ModelFailed)
        require(is_answer, f"ConfigureRoute of an open route is answered with {name}")
        session.actions(session.predict(), contract.num_envs)


@contextmanager
def _beside_another_contract(subject: ModelSubject) -> Iterator[RawModelSession]:
    """Open two routes: one with all lanes, and one as different from it as the model accepts.

    Each attempt has its own session, since a refusal may end it.
    """
    contract = subject.wide_contract
    other_spaces = replace(
        contract,
        num_envs=1,
        observation_space=TupleSpec((contract.observation_space,)),
        action_space=TupleSpec((contract.action_space,)),
    )
    for other in (other_spaces, replace(contract, num_envs=1), contract):
        with subject.acting() as session:
            session.configure(ROUTE, contract)
            session.predict()
            response = session.ask(session.configure_request(_OTHER_ROUTE, other))
            if isinstance(response, RouteConfigured):
                yield session
                return
    raise ClauseNotObservable("the model opens only one route per session")


@holds("route.close")
def close_route_releases_the_route(subject: ModelSubject) -> None:
    with subject.acting() as session:
        session.configure()
        expect(session.ask(session.close_route_request()), RouteClosed, "CloseRoute")
        error = session.must_be_unconfigured(session.predict_request(), "after CloseRoute")
        if error.is_recoverable:
            session.configure()
            session.predict()


@holds("predict.observation")
def observations_are_of_the_routes_space(subject: ModelSubject) -> None:
    with subject.acting() as session:
        session.configure()
        session.refused(_misshapen(session), "of the wrong size")


@holds("predict.context")
def the_response_mirrors_the_context(subject: ModelSubject) -> None:
    """Session, route, request id and slots unchanged, for lanes at different steps."""
    with subject.acting() as session:
        session.configure(ROUTE, subject.wide_contract)
        for slots in ([slot(0)], [slot(1, 0, "a later episode"), slot(0, 1)]):
            request = session.predict_request(slots=slots)
            context = session.predict(request).context
            require(context == request.context, f"{request.context} has become {context}")


@holds("predict.actions")
def there_is_one_action_per_slot(subject: ModelSubject) -> None:
    lanes = subject.contract.num_envs
    with subject.acting() as session:
        session.configure()
        session.actions(session.predict(), lanes)
        single = session.predict_request(slots=[slot(lanes - 1, step=1)])
        session.actions(session.predict(single), 1)
    with subject.acting() as session:
        session.configure(ROUTE, subject.wide_contract)
        _require_actions_in_order(session, subject.wide_contract)


@holds("model.one-response")
def every_request_has_one_response(subject: ModelSubject) -> None:
    """On one route, whose responses are in order: the last one ends the count."""
    with subject.acting() as session:
        session.configure()
        is_recoverable = session.refused(_misshapen(session), "of the wrong size").is_recoverable
    with subject.acting() as session:
        session.configure()
        requests: list[ModelRequest] = [
            session.predict_request(step=step) for step in range(_PIPELINED)
        ]
        if is_recoverable:  # after another error the server may end the session
            requests.insert(3, _misshapen(session))
        requests.append(session.close_route_request())
        session.send(*requests)
        sent = [request.request_id for request in requests]
        received: list[str] = []
        while sent[-1] not in received:
            received.append(session.receive().request_id)
    require_one_response_each(sent, received)


@holds("model.in-band")
def failures_have_a_code_and_a_message(subject: ModelSubject) -> None:
    errors = []
    # One session for each, since an error may end it.
    with subject.session() as session:
        errors.append(session.refused(session.predict_request(), "without a route"))
    with subject.session() as session:
        without = replace(session.configure_request(), contract=None)
        errors.append(session.refused(without, "without a contract"))
    with subject.acting() as session:
        session.configure()
        errors.append(session.refused(_misshapen(session), "with an observation of the wrong size"))
    for error in errors:
        require(error.code is not ModelErrorCode.UNSPECIFIED, f"no code: {error.message!r}")
        require(bool(error.message), f"no message with {error.code.name}")


@holds("model.recoverable")
def a_session_continues_after_a_recoverable_error(subject: ModelSubject) -> None:
    with subject.acting() as session:
        session.configure()
        if session.refused(_misshapen(session), "of the wrong size").is_recoverable:
            session.predict()


@holds("model.arrival")
def without_the_capability_answers_come_as_asked(subject: ModelSubject) -> None:
    if CONCURRENT_PREDICT in subject.shake_hands().capabilities:
        raise ClauseNotObservable("the server has the capability concurrent_predict")
    with subject.session() as session:
        requests = _two_routes(session)
        session.send(*requests)
        received = [session.receive().request_id for _ in requests]
    expected = [request.request_id for request in requests]
    require(received == expected, f"responses came in the order {received}")


@holds("model.route-order")
def requests_of_a_route_take_effect_in_order(subject: ModelSubject) -> None:
    """A route's whole lifecycle is sent without waiting, and another one starts.

    A policy's handling of lifecycles (on_reset, the end of an episode) is not visible in any
    response, and cannot be checked.
    """
    with subject.session() as session:
        is_recoverable = session.refused(session.predict_request(), "of no route").is_recoverable
    with subject.acting() as session:
        session.configure()
        session.ask(session.close_route_request())
        requests: list[ModelRequest] = [
            session.configure_request(),
            *(session.predict_request(step=step) for step in range(5)),
            session.close_route_request(),
        ]
        effects: list[type[ModelResponse]] = [RouteConfigured, *[Predicted] * 5, RouteClosed]
        if is_recoverable:  # after another error the server may end the session
            requests += [session.predict_request(), session.configure_request()]
            requests.append(session.predict_request())
            effects += [ModelFailed, RouteConfigured, Predicted]
        session.send(*requests)
        responses = [session.receive() for _ in requests]
    order = [response.request_id for response in responses]
    expected = [request.request_id for request in requests]
    require(order == expected, f"responses of one route came in the order {order}")
    found = [type(response) for response in responses]
    names = [kind.__name__ for kind in found]
    require(found == effects, f"a route's requests, sent together, had the effects {names}")


@holds("model.close-drains")
def close_is_answered_after_everything_else(subject: ModelSubject) -> None:
    """Sent after predictions on two routes; then the stream ends.

    Only where the operator allows it: by the text, Close may end the whole server.
    """
    if not subject.may_ask_shutdown:
        raise ClauseNotObservable(f"would send Close, which may end the endpoint; {END_REMEDY}")
    if subject.is_shut_down:
        raise ClauseNotObservable("the endpoint has accepted Shutdown, and is gone")
    with subject.acting() as session:
        session.configure()
        session.ask(session.close_route_request())
        requests = [*_two_routes(session), CloseModel(session.new_id())]
        session.send(*requests)
        responses = session.until_end()
    unanswered = {request.request_id for request in requests} - {
        response.request_id for response in responses
    }
    require(not unanswered, f"{len(unanswered)} requests up to Close have no response")
    closed = [isinstance(response, ModelClosed) for response in responses]
    require(closed.count(True) == 1, f"Close is answered {closed.count(True)} times")
    require(closed[-1], "Close is answered before earlier requests")


def _misshapen(session: RawModelSession) -> Predict:
    valid = session.predict_request()
    return replace(valid, observation=valid.observation + b"\xff")


def _two_routes(session: RawModelSession) -> list[ModelRequest]:
    routes = (ROUTE, _OTHER_ROUTE)
    requests: list[ModelRequest] = [session.configure_request(route) for route in routes]
    for step in range(_PIPELINED):
        requests += [session.predict_request(route, step=step) for route in routes]
    return requests


def _require_actions_in_order(session: RawModelSession, contract: EnvContract) -> None:
    """Require that the actions of a Predict are in the order of its slots.

    A response does not show the order by itself. So two observations that get different actions in
    single Predicts must get the same actions when they share a Predict.
    """
    columns = varied(contract.observation_space, _NUM_CANDIDATES, seed=0)

    def ask(*rows_and_lanes: tuple[int, int]) -> Actions:
        slots = [slot(lane, 0, session.new_id()) for _, lane in rows_and_lanes]
        chosen = rows(columns, *(row for row, _ in rows_and_lanes))
        request = session.predict_request(ROUTE, slots=slots, columns=chosen)
        return session.actions(session.predict(request), len(slots))

    first = ask((0, 0))
    for row in range(1, _NUM_CANDIDATES):
        second = ask((row, 1))
        if not _is_close(first, second):
            break
    else:
        raise ClauseNotObservable(
            f"the policy has one action for {_NUM_CANDIDATES} different observations, {_UNSEEN}"
        )
    for _ in range(_REPEATS):
        again = ask((0, 0)), ask((row, 1))
        if not (_is_close(again[0], first) and _is_close(again[1], second)):
            raise ClauseNotObservable(f"the policy does not repeat its actions, {_UNSEEN}")
    together = [ask((0, 0), (row, 1)) for _ in range(_REPEATS)]
    matches = [
        _is_close(rows(actions, 0), first) and _is_close(rows(actions, 1), second)
        for actions in together
    ]
    if not any(matches):
        raise ClauseBroken(
            f"two observations get the actions {_shown(first)} and {_shown(second)} one after "
            f"the other, but {_shown(together[0])} in one Predict"
        )
    if not all(matches):
        raise ClauseNotObservable(f"the policy does not repeat its actions, {_UNSEEN}")


def _is_close(one: Actions, other: Actions) -> bool:
    return all(_is_close_part(*parts) for parts in zip(one, other, strict=True))


def _is_close_part(one: Column, other: Column) -> bool:
    if isinstance(one, tuple) or isinstance(other, tuple):
        return one == other
    if one.dtype.kind in "iub":
        return np.array_equal(one, other)
    left, right = one.astype(np.float64), other.astype(np.float64)
    return np.allclose(left, right, rtol=_TOLERANCE, atol=_TOLERANCE)


def _shown(actions: Actions) -> str:
    parts = [list(part) if isinstance(part, tuple) else part.tolist() for part in actions]
    text = str(parts[0] if len(parts) == 1 else parts)
    return text if len(text) < 80 else text[:80] + "…"


# Largest offset of a Box's integers: the range of a pixel.
_MOST_STEPS_UP = 255


def varied(spec: SpaceSpec, num_rows: int, seed: int) -> list[Column]:
    """Return columns of ``num_rows`` random observations within ``spec``.

    Numbers stay near zero also where bounds are at the end of the dtype, since a policy may
    overflow for values that no environment has.
    """
    rng = np.random.default_rng(seed)
    rest = conforming(spec, num_rows)
    return [
        _in_box(leaf.spec, column, rng)
        if isinstance(leaf.spec, BoxSpec)
        else _sampled(leaf, num_rows, seed)
        for leaf, column in zip(leaves(spec), rest, strict=True)
    ]


def rows(columns: list[Column], *chosen: int) -> list[Column]:
    return [
        tuple(column[row] for row in chosen) if isinstance(column, tuple) else column[list(chosen)]
        for column in columns
    ]


def _sampled(leaf: Leaf, num_rows: int, seed: int) -> Column:
    spec = leaf.spec
    if isinstance(spec, TextSpec):  # it may allow texts of any length
        spec = replace(spec, max_length=min(spec.max_length, spec.min_length + 8))
    space = to_gymnasium(spec)
    space.seed(seed)
    column: Column = coerce(leaf, [space.sample() for _ in range(num_rows)], num_rows)
    return column


def _in_box(spec: BoxSpec, rest: Any, rng: np.random.Generator) -> Column:
    low, high = spec.bounds()
    if rest.dtype.kind in "iu":
        steps = np.minimum(high - rest, _MOST_STEPS_UP).astype(np.int64)
        drawn = rest + rng.integers(0, steps + 1).astype(rest.dtype)
    elif rest.dtype.kind == "b":
        drawn = rng.integers(0, 2, rest.shape).astype(rest.dtype)
    else:
        drawn = rest + rng.uniform(-1.0, 1.0, rest.shape).astype(rest.dtype)
    clipped: Column = np.clip(drawn, low, high)
    return clipped
