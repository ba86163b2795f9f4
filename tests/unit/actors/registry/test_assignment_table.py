"""Assignments of sessions to endpoints, and the sessions that have to move."""

from collections import Counter
from collections.abc import Collection, Sequence

from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.actors.registry.assignment_table import Assignment, AssignmentTable, EndpointRecord
from rlmesh_ray.rllib.runner.assignment_requests import session_names
from rlmesh_ray.server.observe.endpoint_status import RunnerStatus

LATER_S = 60.0
"""A time without new sessions for a while."""


def endpoints(ids: str, nodes: str = "") -> list[EndpointRecord]:
    where = nodes or "n" * len(ids)
    return [
        EndpointRecord(each, 1, f"{each}:1", "fleet", node)
        for each, node in zip(ids, where, strict=True)
    ]


class Runners:
    """Sessions that open at their assigned endpoints and rebalance now and then."""

    def __init__(self, table: AssignmentTable, members: Sequence[EndpointRecord]) -> None:
        self.table = table
        self.members = members
        self.placed: dict[str, str] = {}
        self.num_moves = 0

    def open(self, session: str, wanted: str, reserved: Collection[str] = ()) -> str | None:
        record = self.table.assign(session, wanted, "n", self.members, reserved, 0.0)
        if record is not None:
            self.placed[session] = record.endpoint_id
        return record.endpoint_id if record else None

    def rebalance(
        self, sessions: Collection[str], reserved: Collection[str] = ()
    ) -> tuple[str, ...]:
        placed = {each: self.placed[each] for each in sessions}
        return self.table.rebalance(placed, self.members, reserved, LATER_S)

    def move_all(self, reserved: Collection[str] = ()) -> None:
        """Rebalance as if each session had a runner of its own, one after the other."""
        for session in sorted(self.placed):
            for mover in self.rebalance([session], reserved):
                self.num_moves += 1
                assert self.open(mover, self.placed[mover], reserved) != ""

    @property
    def load(self) -> Counter[str]:
        return Counter(self.placed.values())


def test_a_session_gets_its_planned_endpoint() -> None:
    runners = Runners(AssignmentTable(), endpoints("ab"))

    assert [runners.open(str(index), each) for index, each in enumerate("abab")] == list("abab")


def test_sessions_get_their_planned_endpoints_in_any_order() -> None:
    for order in ("aaabbb", "abaabb", "bbbaaa"):
        runners = Runners(AssignmentTable(), endpoints("ab"))
        assert [runners.open(str(index), each) for index, each in enumerate(order)] == list(order)


def test_a_session_gets_the_emptiest_endpoint_where_its_own_is_gone() -> None:
    runners = Runners(AssignmentTable(), endpoints("abc"))

    assert [runners.open(str(index), "gone") for index in range(4)] == ["a", "b", "c", "a"]


def test_a_plan_that_is_older_than_the_fleet_overloads_no_endpoint() -> None:
    runners = Runners(AssignmentTable(), endpoints("abcd"))

    for index in range(40):
        runners.open(str(index), "a")

    assert max(runners.load.values()) == 16


def test_a_session_that_has_lost_its_endpoint_gets_the_planned_one_only_if_that_is_as_empty() -> (
    None
):
    runners = Runners(AssignmentTable(), endpoints("abc"))
    for index, wanted in enumerate("abbc"):
        runners.open(str(index), wanted)
    runners.members = endpoints("abf")

    assert runners.open("3", "b") == "f"


def test_of_endpoints_as_empty_the_one_on_the_same_node_is_taken() -> None:
    runners = Runners(AssignmentTable(), endpoints("abc", "xny"))

    assert runners.open("0", "gone") == "b"


def test_a_session_that_is_opened_again_keeps_its_endpoint() -> None:
    runners = Runners(AssignmentTable(), endpoints("ab"))
    runners.open("0", "a")
    runners.open("1", "a")

    assert runners.open("0", "b") == "a"
    assert runners.table.session_counts == {"a": 2}


def test_without_endpoints_there_is_no_assignment() -> None:
    runners = Runners(AssignmentTable(), [])

    assert runners.open("0", "a") is None
    assert not runners.table.session_counts


def test_no_session_moves_while_the_load_is_balanced() -> None:
    runners = Runners(AssignmentTable(), endpoints("ab"))
    for index, each in enumerate("aba"):
        runners.open(str(index), each)

    assert runners.rebalance(["0", "1", "2"]) == ()


def test_a_larger_fleet_moves_as_few_sessions_as_balance_it() -> None:
    runners = Runners(AssignmentTable(), endpoints("a"))
    for index in range(4):
        runners.open(str(index), "a")
    runners.members = endpoints("ab")

    assert runners.rebalance(["0"]) == ("0",)
    assert runners.rebalance(["1"]) == ("1",)
    assert runners.rebalance(["2", "3"]) == ()
    # The same answer until the session has moved.
    assert runners.rebalance(["0", "2"]) == ("0",)
    assert runners.open("0", "a") == "b"
    assert runners.rebalance(["0", "2"]) == ()


def test_sessions_of_a_retiring_endpoint_move_and_no_others() -> None:
    runners = Runners(AssignmentTable(), endpoints("abc"))
    for index in range(6):
        runners.open(str(index), "abc"[index % 3])
    runners.members = endpoints("ab")

    assert runners.rebalance(list("012345")) == ("2", "5")
    runners.move_all()
    assert runners.load == {"a": 3, "b": 3}


def test_no_session_moves_when_no_endpoint_is_left() -> None:
    runners = Runners(AssignmentTable(), endpoints("a"))
    runners.open("0", "a")
    runners.members = []

    assert runners.rebalance(["0"]) == ()


def test_no_session_moves_for_balance_while_new_ones_still_open() -> None:
    table, members = AssignmentTable(), endpoints("ab")
    for index in range(2):
        table.assign(str(index), "a", "n", members, (), 100.0)
    placed = {"0": "a", "1": "a"}

    assert table.rebalance(placed, members, (), 104.0) == ()
    assert table.rebalance(placed, members, (), 106.0) == ("1",)


def test_a_session_that_has_its_endpoint_on_another_node_moves_first() -> None:
    table, members = AssignmentTable(), endpoints("ab", "xy")
    for session, node_id in (("0", "y"), ("1", "x"), ("2", "x")):
        table.assign(session, "a", node_id, endpoints("a", "x"), (), 0.0)
    placed = dict.fromkeys("012", "a")

    assert table.rebalance(placed, members, (), LATER_S) == ("0",)


def test_training_and_evaluation_are_balanced_separately() -> None:
    runners = Runners(AssignmentTable(), endpoints("abe"))
    for index in range(4):
        runners.open(str(index), "ab"[index % 2], reserved="e")
    runners.open("evaluation", "e", reserved="e")

    assert runners.load == {"a": 2, "b": 2, "e": 1}
    assert runners.rebalance(list(runners.placed), reserved="e") == ()

    runners.members = endpoints("abce")
    runners.move_all(reserved="e")
    assert runners.load == {"a": 1, "b": 2, "c": 1, "e": 1}


def test_evaluation_goes_to_the_others_when_its_own_endpoints_are_gone() -> None:
    runners = Runners(AssignmentTable(), endpoints("abe"))
    runners.open("evaluation", "e", reserved="e")
    runners.members = endpoints("ab")

    assert runners.rebalance(["evaluation"], reserved="e") == ("evaluation",)
    assert runners.open("evaluation", "e", reserved="e") == "a"


def test_assignments_are_entered_again_by_rebalance() -> None:
    table = AssignmentTable()

    assert table.rebalance({"0": "a", "1": "b"}, endpoints("ab"), (), LATER_S) == ()
    assert table.session_counts == {"a": 1, "b": 1}


def test_assignments_that_no_runner_reports_are_dropped_after_a_while() -> None:
    table, members = AssignmentTable(), endpoints("a")
    for session in "01":
        table.assign(session, "a", "n", members, (), 0.0)
    table.rebalance({"1": "a"}, members, (), 500.0)

    table.rebalance({"1": "a"}, members, (), 700.0)

    assert table.session_counts == {"a": 1}


def test_released_sessions_have_no_assignment() -> None:
    runners = Runners(AssignmentTable(), endpoints("ab"))
    runners.open("0", "a")

    runners.table.release(["0", "stranger"])

    assert not runners.table.session_counts


def test_an_assignment_does_not_show_its_token() -> None:
    assert "secret" not in repr(Assignment("h:1", token="secret"))


ids = st.lists(st.sampled_from("abcdef"), min_size=1, unique=True).map("".join)
plans = st.lists(st.sampled_from("abcdef"), max_size=24)


def moves_needed(load: Counter[str], members: str) -> int:
    """How many sessions have to move until the load is balanced."""
    base, more = divmod(load.total(), len(members))
    fullest_first = sorted((load[each] for each in members), reverse=True)
    wanted = [base + 1] * more + [base] * (len(members) - more)
    kept = sum(min(pair) for pair in zip(fullest_first, wanted, strict=True))
    return load.total() - kept


@given(ids, ids, plans)
def test_the_load_is_balanced_in_the_end_with_the_fewest_moves(
    before: str, after: str, plan: list[str]
) -> None:
    runners = Runners(AssignmentTable(), endpoints(before))
    for index, wanted in enumerate(plan):
        runners.open(f"{index:02}", wanted)
    load = runners.load

    runners.members = endpoints(after)
    is_uneven = any(load[each] for each in before if each not in after) or (
        max(load[each] for each in after) - min(load[each] for each in after) > 1
    )
    runners.move_all()

    assert set(runners.load) <= set(after)
    counts = [runners.load[each] for each in after]
    assert max(counts) - min(counts) <= 1
    assert sum(counts) == len(plan)
    assert runners.num_moves == (moves_needed(load, after) if is_uneven else 0)
    runners.move_all()
    assert [runners.load[each] for each in after] == counts


@given(ids, ids, plans)
def test_the_same_calls_have_the_same_answers(before: str, after: str, plan: list[str]) -> None:
    def answers() -> tuple[object, ...]:
        runners = Runners(AssignmentTable(), endpoints(before))
        granted = [runners.open(f"{index:02}", wanted) for index, wanted in enumerate(plan)]
        runners.members = endpoints(after)
        return granted, runners.rebalance(list(runners.placed))

    assert answers() == answers()


def test_a_table_is_dropped_when_no_runner_has_reported_for_long() -> None:
    table = AssignmentTable()
    assert table.is_forgotten(0.0)
    table.assign("0", "a", "n", endpoints("a"), (), 0.0)

    assert not table.is_forgotten(600.0)
    assert table.is_forgotten(601.0)


def test_runners_are_known_by_the_names_of_their_sessions() -> None:
    table, members = AssignmentTable(), endpoints("ab")
    training = session_names("plan", 2, 3, in_evaluation=False, runner="r")
    evaluation = session_names("plan", 1, 1, in_evaluation=True, runner="e")
    for number, name in enumerate(training):
        table.assign(name, "ab"[number % 2], "node", members, (), 1.0)
    table.assign(evaluation[0], "b", "", members, (), 2.0)
    tenth = session_names("plan", 10, 1, in_evaluation=False, runner="t")
    table.assign(tenth[0], "a", "node", members, (), 2.0)
    table.assign("another program's", "a", "node", members, (), 2.0)
    table.rebalance({training[0]: "a"}, (), (), 4.0)

    assert table.runners("hills", 5.0) == [
        RunnerStatus("hills", "evaluation runner 1", "e", "", ("b",), 1, 3.0),
        RunnerStatus("hills", "training runner 2", "r", "node", ("a", "b"), 3, 1.0),
        RunnerStatus("hills", "training runner 10", "t", "node", ("a",), 1, 3.0),
    ]
    assert [each.name for each in table.runners("hills", 603.0)] == ["training runner 2"]
