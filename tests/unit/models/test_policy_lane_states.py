import itertools
import weakref

import numpy as np
import pytest

from rlmesh_ray.errors import PolicyError
from rlmesh_ray.models.policy import EpisodeStates, RouteRows, Rows
from rlmesh_ray.protocol.messages import PredictSlot


def slot(env_index: int = 0, episode_id: str = "", *, reset: bool = False) -> PredictSlot:
    return PredictSlot(env_index=env_index, episode_id=episode_id, step=0, reset=reset)


def rows(**routes: list[PredictSlot]) -> Rows:
    num_rows = sum(len(slots) for slots in routes.values())
    return Rows(np.zeros(num_rows), [RouteRows(key, slots) for key, slots in routes.items()])


class Route(str):
    """The key of a route, which can be referred to weakly."""

    __slots__ = ("__weakref__",)


def rows_of(route: Route, slots: list[PredictSlot]) -> Rows:
    return Rows(np.zeros(len(slots)), [RouteRows(route, slots)])


def counting_states() -> EpisodeStates[int]:
    counter = itertools.count()
    return EpisodeStates(lambda: next(counter))


def test_a_lane_keeps_its_state_while_its_episode_runs() -> None:
    states = counting_states()

    first = states.of(rows(a=[slot(0, "x", reset=True), slot(1, "y", reset=True)]))
    second = states.of(rows(a=[slot(1, "y"), slot(0, "x")]))

    assert (first, second) == ([0, 1], [1, 0])


def test_lanes_of_different_routes_are_different_lanes() -> None:
    states = counting_states()

    assert states.of(rows(a=[slot(0), slot(1)], b=[slot(0)])) == [0, 1, 2]


def test_a_reset_begins_anew() -> None:
    states = counting_states()
    states.of(rows(a=[slot(0, "x")]))

    assert states.of(rows(a=[slot(0, "x", reset=True)])) == [1]


@pytest.mark.parametrize("before", ["x", ""])
def test_another_episode_begins_anew_without_a_reset_flag(before: str) -> None:
    states = counting_states()
    states.of(rows(a=[slot(0, before)]))

    assert states.of(rows(a=[slot(0, "z")])) == [1]
    assert states.of(rows(a=[slot(0, "z")])) == [1]


def test_an_empty_episode_id_does_not_begin_an_episode() -> None:
    states = counting_states()
    states.of(rows(a=[slot(0, "x")]))

    assert states.of(rows(a=[slot(0, "")])) == [0]
    assert states.of(rows(a=[slot(0, "x")])) == [0]


def test_a_lane_twice_in_one_batch_is_refused_and_changes_nothing() -> None:
    states = counting_states()
    states.of(rows(a=[slot(0, "x")]))

    with pytest.raises(PolicyError, match="env_index of its own"):
        states.of(rows(a=[slot(0, "z"), slot(0, "y")]))

    assert states.of(rows(a=[slot(0, "x")])) == [0]


def test_forgetting_a_lane_keeps_the_other_lanes() -> None:
    states = counting_states()
    states.of(rows(a=[slot(0), slot(1)]))

    states.forget("a", 0)

    assert states.of(rows(a=[slot(0), slot(1)])) == [2, 1]


def test_forgetting_a_route_frees_all_its_lanes() -> None:
    states = counting_states()
    states.of(rows(a=[slot(0), slot(1)], b=[slot(0)]))

    states.forget("a", None)

    assert len(states) == 1
    assert states.of(rows(b=[slot(0)])) == [2]


def test_forgetting_what_is_unknown_does_nothing() -> None:
    states = counting_states()
    states.of(rows(a=[slot(0)]))

    states.forget("b", None)
    states.forget("b", 0)
    states.forget("a", 7)

    assert len(states) == 1


def test_nothing_is_left_of_a_route_whose_lanes_are_all_forgotten() -> None:
    states, route = counting_states(), Route("a")
    states.of(rows_of(route, [slot(0), slot(1)]))
    is_known = weakref.ref(route)
    del route

    states.forget("a", 0)
    assert is_known()
    states.forget("a", 1)

    assert len(states) == 0
    assert not is_known()


def test_each_dropped_state_is_freed_once() -> None:
    freed: list[int] = []
    counter = itertools.count()
    states = EpisodeStates(lambda: next(counter), freed.append)

    states.of(rows(a=[slot(0, "x"), slot(1, "y"), slot(2)], b=[slot(0)]))
    states.of(rows(a=[slot(0, "z"), slot(1, "y", reset=True), slot(2)]))
    assert freed == [0, 1]
    states.forget("a", 0)
    states.forget("a", 0)
    states.forget("a", None)
    states.forget("a", None)

    assert sorted(freed) == [0, 1, 2, 4, 5]


def test_lanes_of_one_route_in_two_parts_of_a_batch_are_one_route_s() -> None:
    states = counting_states()
    parts = [RouteRows("a", [slot(0)]), RouteRows("b", [slot(0)]), RouteRows("a", [slot(1)])]

    assert states.of(Rows(np.zeros(3), parts)) == [0, 1, 2]
    with pytest.raises(PolicyError, match="a lane occurs twice"):
        states.of(Rows(np.zeros(3), [*parts[:2], RouteRows("a", [slot(0)])]))
    assert len(states) == 3


def test_a_route_without_rows_is_not_remembered() -> None:
    states, route = counting_states(), Route("a")
    is_known = weakref.ref(route)

    states.of(rows_of(route, []))
    del route

    assert not is_known()
