from collections.abc import Collection, Mapping
from typing import Any

import pytest

from rlmesh_ray.actors.registry.assignment_table import Assignment
from rlmesh_ray.errors import EndpointUnreachableError
from rlmesh_ray.rllib.config.rollout_plan import (
    CombinedResolver,
    EndpointResolver,
    FixedAddressResolver,
    RolloutPlan,
)
from rlmesh_ray.rllib.config.session_endpoints import SessionLayout
from rlmesh_ray.rllib.runner.assignment_requests import SessionAssignments, assignments_for
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.spec import DiscreteSpec

CONTRACT = EnvContract("Toy-v0", DiscreteSpec(5), DiscreteSpec(2), 1, AutoresetMode.NEXT_STEP)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Fleet:
    """A resolver with scripted answers that records its requests.

    An answer is a list that is empty as long as it is not there.
    """

    def __init__(self, *endpoint_ids: str) -> None:
        self.endpoint_ids = list(endpoint_ids)
        self.asked: list[Any] = []
        self.answers: list[list[Collection[str]]] = []
        self.released: list[str] = []
        self.is_away = False

    def __len__(self) -> int:
        return len(self.endpoint_ids)

    def address(self, index: int) -> str:
        return f"{self.endpoint_ids[index]}:1"

    def assign(self, session: str, index: int, node_id: str) -> Assignment:
        self.asked.append((session, index, node_id))
        if not self.endpoint_ids:
            raise EndpointUnreachableError("there is none")
        return Assignment(self.address(index), self.endpoint_ids[index], token="its own")

    def rebalance(self, placed: Mapping[str, str]) -> Any:
        if self.is_away:
            raise EndpointUnreachableError("the registry is away")
        self.asked.append(dict(placed))
        self.answers.append([])
        return self.answers[-1]

    def release(self, sessions: Collection[str]) -> None:
        self.released += sessions


def poll(answer: list[Collection[str]]) -> Collection[str] | None:
    assert answer is not None
    return answer[0] if answer else None


def assignments_at(*resolvers: EndpointResolver, clock: Clock | None = None) -> SessionAssignments:
    """Return the assignments of a runner with one session at each endpoint, named a, b, c ..."""
    joined = CombinedResolver.of(resolvers)
    number = len(joined)
    plan = RolloutPlan(joined, CONTRACT, SessionLayout(number, 1, number))
    names = "abcdefgh"[:number]
    return SessionAssignments(plan, range(number), names, "here", clock=clock or Clock(), poll=poll)


def taken(assignments: SessionAssignments) -> list[Assignment]:
    return [assignments.get(number) for number in range(len(assignments.endpoints))]


def test_a_session_keeps_its_assignment() -> None:
    fleet = Fleet("x", "y")
    assignments = assignments_at(fleet)

    first, second = taken(assignments), taken(assignments)

    assert [assignment.endpoint_id for assignment in first] == ["x", "y"]
    assert [a is b for a, b in zip(first, second, strict=True)] == [True, True]
    assert fleet.asked == [("a", 0, "here"), ("b", 1, "here")]


def test_a_session_that_has_lost_its_assignment_asks_for_another() -> None:
    fleet = Fleet("x", "y")
    assignments = assignments_at(fleet)
    taken(assignments)
    fleet.endpoint_ids = ["x", "z"]

    assignments.drop([1])

    assert assignments.endpoint_of(1) == ""
    assert [assignment.endpoint_id for assignment in taken(assignments)] == ["x", "z"]
    assert assignments.endpoint_of(1) == "z"


def test_without_an_endpoint_there_is_no_assignment() -> None:
    fleet = Fleet("x")
    assignments = assignments_at(fleet)
    fleet.endpoint_ids = []

    with pytest.raises(EndpointUnreachableError):
        assignments.get(0)

    fleet.endpoint_ids = ["x"]
    assert assignments.get(0).endpoint_id == "x"


def test_a_directory_is_asked_at_once_and_then_after_two_seconds_at_the_earliest() -> None:
    clock, fleet = Clock(), Fleet("x", "y")
    assignments = assignments_at(fleet, clock=clock)
    taken(assignments)
    fleet.asked.clear()

    for now_s in (0.0, 1.9, 2.0, 3.9, 4.0):
        clock.now_s = now_s
        assignments.request_rebalance()
        for answer in fleet.answers:
            answer.append(())
        assert assignments.sessions_to_move() == frozenset()

    assert fleet.asked == [{"a": "x", "b": "y"}] * 3


def test_no_request_follows_while_an_answer_is_awaited_unless_it_takes_very_long() -> None:
    clock, fleet = Clock(), Fleet("x")
    assignments = assignments_at(fleet, clock=clock)
    taken(assignments)

    for now_s in (0.0, 5.0, 29.0, 30.0):
        clock.now_s = now_s
        assignments.request_rebalance()
        assert assignments.sessions_to_move() == frozenset()

    assert len(fleet.answers) == 2


def test_without_a_registry_no_session_moves_until_it_is_back() -> None:
    clock, fleet = Clock(), Fleet("x")
    assignments = assignments_at(fleet, clock=clock)
    taken(assignments)
    fleet.is_away = True

    assignments.request_rebalance()
    first = set(assignments.sessions_to_move())
    fleet.is_away = False
    clock.now_s += 2
    assignments.request_rebalance()
    fleet.answers[0].append(("a",))

    assert (first, set(assignments.sessions_to_move())) == (set(), {0})


def test_a_resolver_may_answer_that_sessions_never_move() -> None:
    class Rigid(Fleet):
        def rebalance(self, placed: Mapping[str, str]) -> None:
            return None

    assignments = assignments_at(Rigid("x"))
    taken(assignments)

    assignments.request_rebalance()

    assert assignments.sessions_to_move() == frozenset()


def test_a_session_that_has_to_move_is_reported_once() -> None:
    fleet = Fleet("x", "y", "z")
    assignments = assignments_at(fleet)
    taken(assignments)
    assignments.request_rebalance()
    fleet.answers[0].append(("a", "c", "unknown"))

    assert assignments.sessions_to_move() == {0, 2}
    assert assignments.sessions_to_move() == frozenset()


def test_a_session_with_another_assignment_does_not_move_again() -> None:
    fleet = Fleet("x", "y")
    assignments = assignments_at(fleet)
    taken(assignments)
    assignments.request_rebalance()
    assignments.drop([0, 1])
    assignments.get(0)
    fleet.answers[0].append(("a", "b"))

    assert assignments.sessions_to_move() == frozenset()


def test_each_directory_is_asked_for_its_own_sessions_and_answers_in_its_own_time() -> None:
    fleet, other = Fleet("x", "y"), Fleet("v")
    assignments = assignments_at(fleet, FixedAddressResolver(("127.0.0.1:1",)), other, fleet)
    taken(assignments)
    fleet.asked.clear()
    other.asked.clear()

    assignments.request_rebalance()
    other.answers[0].append(("d",))
    first = set(assignments.sessions_to_move())
    fleet.answers[0].append(("b", "e"))
    second = set(assignments.sessions_to_move())

    assert (fleet.asked, other.asked) == (
        [
            {"a": "x", "b": "y", "e": "x", "f": "y"},
        ],
        [{"d": "v"}],
    )
    assert (first, second) == ({3}, {1, 4})


def test_fixed_addresses_are_never_asked() -> None:
    class Untouchable(FixedAddressResolver):
        def rebalance(self, placed: Mapping[str, str]) -> None:
            raise AssertionError

    def no_clock() -> float:
        raise AssertionError

    addresses = Untouchable(("127.0.0.1:1", "127.0.0.1:2"))
    layout = SessionLayout(2, 1, 2)
    plan = RolloutPlan(CombinedResolver.of([addresses]), CONTRACT, layout)
    assignments = SessionAssignments(plan, (0, 1), ("a", "b"), "here", clock=no_clock)
    taken(assignments)

    assignments.request_rebalance()

    assert assignments.sessions_to_move() == frozenset()


def test_every_resolver_gets_its_own_assignments_back() -> None:
    fleet, other = Fleet("x", "y"), Fleet("v")
    assignments = assignments_at(fleet, other, fleet)
    taken(assignments)

    assignments.release()

    assert (fleet.released, other.released) == (["a", "b", "d", "e"], ["c"])


def test_an_assignment_that_comes_when_the_runner_has_stopped_is_released() -> None:
    fleet = Fleet("x")
    assignments = assignments_at(fleet)
    assignments.release()
    fleet.released.clear()

    assignments.get(0)  # in a thread that had begun before

    assert fleet.released == ["a"]


def test_no_two_runners_have_sessions_of_the_same_name() -> None:
    fleet = Fleet("e")
    layout = SessionLayout(1, 1, 2)
    plan = RolloutPlan(CombinedResolver.of([fleet]), CONTRACT, layout, plan_id="plan")
    for worker_index in (0, 1):
        for in_evaluation in (False, True):
            for _ in range(2):  # two runners outside of actors
                assignments = assignments_for(plan, worker_index, in_evaluation=in_evaluation)
                assignments.get(0)
                assignments.get(1)

    names = [name for name, _, _ in fleet.asked]
    assert len(set(names)) == len(names) == 16
    assert {name.partition("@")[0] for name in names} == {
        f"plan/{group}/{worker_index}/{number}"
        for group in ("train", "eval")
        for worker_index in (0, 1)
        for number in (0, 1)
    }
