from typing import Any

import pytest

from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.errors import EndpointLostError
from rlmesh_ray.evaluation.coordinator import (
    RemoteEndpoint,
    have_failed,
    next_due_s,
    next_endpoint,
)
from rlmesh_ray.evaluation.result import EndpointRole

GONE = EndpointLostError("gone", "a")
PATIENCE_S = 30.0


def endpoints(count: int, *, is_known: bool = False) -> list[RemoteEndpoint[Any]]:
    def find() -> ConnectOptions:
        raise GONE

    def connect(_: ConnectOptions) -> Any:
        raise GONE

    return [
        RemoteEndpoint(EndpointRole.ENV, find, connect, is_known=is_known) for _ in range(count)
    ]


def at_work(count: int) -> list[RemoteEndpoint[Any]]:
    """Return endpoints that have all been reached."""
    found = endpoints(count)
    for each in found:
        each.reach()
    return found


def test_users_are_spread_evenly() -> None:
    found = endpoints(3)
    chosen = []
    for _ in range(6):
        endpoint = next_endpoint(found, 0.0)
        assert endpoint is not None
        endpoint.num_users += 1
        chosen.append(found.index(endpoint))
    found[1].num_users -= 1

    assert chosen == [0, 1, 2, 0, 1, 2]
    assert next_endpoint(found, 0.0) is found[1]


def test_a_working_endpoint_comes_before_one_that_failed() -> None:
    first, second = found = at_work(2)
    second.num_users += 1
    first.lose(GONE, 0.0, is_final=False)

    assert next_endpoint(found, 1.0) is second


def test_a_lost_endpoint_is_tried_again_later_and_later() -> None:
    (endpoint,) = found = at_work(1)
    now_s = 0.0
    delays_s = []
    for _ in range(9):
        endpoint.lose(GONE, now_s, is_final=False)
        assert not endpoint.is_due(now_s)
        assert next_endpoint(found, now_s) is None
        due_s = next_due_s(found, now_s)
        delays_s.append(due_s - now_s)
        now_s = due_s
        assert endpoint.is_due(now_s)

    assert delays_s == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])


def test_several_users_of_one_endpoint_report_one_loss() -> None:
    (endpoint,) = found = at_work(1)

    news = [endpoint.lose(GONE, 0.0, is_final=False) for _ in range(3)]

    assert news == [True, False, False]
    assert next_due_s(found, 0.0) == pytest.approx(0.1)


def test_after_a_recovery_delays_are_short_again() -> None:
    (endpoint,) = found = at_work(1)
    for now_s in (0.0, 1.0, 2.0):
        endpoint.lose(GONE, now_s, is_final=False)
    endpoint.reach()

    assert endpoint.lose(GONE, 10.0, is_final=False)
    assert next_due_s(found, 10.0) == pytest.approx(10.1)


def test_a_session_that_cannot_be_opened_again_is_never_due() -> None:
    first, second = found = at_work(2)
    first.lose(GONE, 0.0, is_final=True)

    assert not first.is_due(1e9)
    assert next_endpoint(found, 1e9) is second
    assert next_due_s(found, 0.0) == float("inf")


def test_the_endpoints_have_not_failed_while_one_is_in_use() -> None:
    first, second = found = at_work(2)
    second.num_users += 1
    first.lose(GONE, 0.0, is_final=False)

    assert not have_failed(found, 1e9, PATIENCE_S)
    second.lose(GONE, 0.0, is_final=False)
    assert not have_failed(found, 1e9, PATIENCE_S)


def test_the_endpoints_have_failed_when_patience_ends() -> None:
    first, second = found = at_work(2)
    first.lose(GONE, 0.0, is_final=False)
    second.lose(GONE, 10.0, is_final=False)

    assert not have_failed(found, 39.0, PATIENCE_S)
    assert have_failed(found, 40.0, PATIENCE_S)


def test_the_endpoints_have_failed_where_none_can_be_opened_again() -> None:
    (endpoint,) = found = at_work(1)
    endpoint.lose(GONE, 0.0, is_final=True)

    assert have_failed(found, 0.0, PATIENCE_S)


def test_one_try_each_is_enough_where_none_was_ever_reached() -> None:
    first, second = found = endpoints(2)
    first.lose(GONE, 0.0, is_final=False)
    assert not have_failed(found, 0.0, PATIENCE_S)

    second.lose(GONE, 0.0, is_final=False)

    assert have_failed(found, 0.0, PATIENCE_S)


def test_known_endpoints_get_patience_at_the_first_try() -> None:
    (endpoint,) = found = endpoints(1, is_known=True)
    endpoint.lose(GONE, 0.0, is_final=False)

    assert endpoint.is_known
    assert not have_failed(found, 29.0, PATIENCE_S)
    assert have_failed(found, 30.0, PATIENCE_S)
