"""Which session is sent to which endpoint, and which ones are asked to move."""

from collections import Counter
from collections.abc import Collection, Sequence

from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.actors.registry.lease_table import EndpointRecord
from rlmesh_ray.actors.registry.session_assignment import Assignment, AssignmentTable

LATER_S = 60.0
"""When nobody new has come for a while."""


def endpoints(ids: str, nodes: str = "") -> list[EndpointRecord]:
    where = nodes or "n" * len(ids)
    return [
        EndpointRecord(each, 1, f"{each}:1", "fleet", node)
        for each, node in zip(ids, where, strict=True)
    ]


class Runners:
    """Sessions that go where they are told, and look around now and then."""

    def __init__(self, seating: AssignmentTable, members: Sequence[EndpointRecord]) -> None:
        self.seating = seating
        self.members = members
        self.placed: dict[str, str] = {}
        self.num_moves = 0

    def open(self, session: str, wanted: str, reserved: Collection[str] = ()) -> str | None:
        record = self.seating.assign(session, wanted, "n", self.members, reserved, 0.0)
        if record is not None:
            self.placed[session] = record.endpoint_id
        return record.endpoint_id if record else None

    def rebalance(
        self, sessions: Collection[str], reserved: Collection[str] = ()
    ) -> tuple[str, ...]:
        placed = {each: self.placed[each] for each in sessions}
        return self.seating.rebalance(placed, self.members, reserved, LATER_S)

    def move_all(self, reserved: Collection[str] = ()) -> None:
        """Each session has a runner of its own, and they look around in turns."""
        for session in sorted(self.placed):
            for mover in self.rebalance([session], reserved):
                self.num_moves += 1
                assert self.open(mover, self.placed[mover], reserved) != ""

    @property
    def load(self) -> Counter[str]:
        return Counter(self.placed.values())


def test_a_session_gets_the_endpoint_that_was_dealt_to_it() -> None:
    runners = Runners(AssignmentTable(), endpoints("ab"))

    assert [runners.open(str(index), each) for index, each in enumerate("abab")] == list("abab")


def test_endpoints_are_filled_as_dealt_in_whatever_order_sessions_come() -> None:
    for order in ("aaabbb", "abaabb", "bbbaaa"):
        runners = Runners(AssignmentTable(), endpoints("ab"))
        assert [runners.open(str(index), each) for index, each in enumerate(order)] == list(order)


def test_a_session_gets_the_emptiest_endpoint_where_its_own_is_gone() -> None:
    runners = Runners(AssignmentTable(), endpoints("abc"))

    assert [runners.open(str(index), "gone") for index in range(4)] == ["a", "b", "c", "a"]


def test_a_deal_that_is_older_than_the_fleet_fills_no_endpoint_up() -> None:
    runners = Runners(AssignmentTable(), endpoints("abcd"))

    for index in range(40):
        runners.open(str(index), "a")

    assert max(runners.load.values()) == 16


def test_a_session_that_has_lost_its_endpoint_gets_its_own_only_if_that_is_as_empty() -> None:
    runners = Runners(AssignmentTable(), endpoints("abc"))
    for index, wanted in enumerate("abbc"):
        runners.open(str(index), wanted)
    runners.members = endpoints("abf")

    assert runners.open("3", "b") == "f"


def test_of_endpoints_as_empty_the_one_on_the_same_node_is_taken() -> None:
    runners = Runners(AssignmentTable(), endpoints("abc", "xny"))

    assert runners.open("0", "gone") == "b"


def test_a_session_that_is_opened_again_keeps_its_seat() -> None:
    runners = Runners(AssignmentTable(), endpoints("ab"))
    runners.open("0", "a")
    runners.open("1", "a")

    assert runners.open("0", "b") == "a"
    assert runners.seating.session_counts == {"a": 2}


def test_no_endpoint_means_no_seat_and_nothing_is_kept_of_it() -> None:
    runners = Runners(AssignmentTable(), [])

    assert runners.open("0", "a") is None
    assert not runners.seating.session_counts


def test_nobody_is_moved_while_all_is_level() -> None:
    runners = Runners(AssignmentTable(), endpoints("ab"))
    for index, each in enumerate("aba"):
        runners.open(str(index), each)

    assert runners.rebalance(["0", "1", "2"]) == ()


def test_growing_moves_as_few_sessions_as_level_it_whoever_asks_first() -> None:
    runners = Runners(AssignmentTable(), endpoints("a"))
    for index in range(4):
        runners.open(str(index), "a")
    runners.members = endpoints("ab")

    assert runners.rebalance(["0"]) == ("0",)
    assert runners.rebalance(["1"]) == ("1",)
    assert runners.rebalance(["2", "3"]) == ()
    # Asked again until it has happened.
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


def test_nobody_moves_when_there_is_nowhere_to_go() -> None:
    runners = Runners(AssignmentTable(), endpoints("a"))
    runners.open("0", "a")
    runners.members = []

    assert runners.rebalance(["0"]) == ()


def test_nobody_is_moved_to_level_the_load_while_sessions_still_come() -> None:
    seating, members = AssignmentTable(), endpoints("ab")
    for index in range(2):
        seating.assign(str(index), "a", "n", members, (), 100.0)
    placed = {"0": "a", "1": "a"}

    assert seating.rebalance(placed, members, (), 104.0) == ()
    assert seating.rebalance(placed, members, (), 106.0) == ("1",)


def test_a_session_that_has_its_endpoint_on_another_node_moves_first() -> None:
    seating, members = AssignmentTable(), endpoints("ab", "xy")
    for session, node_id in (("0", "y"), ("1", "x"), ("2", "x")):
        seating.assign(session, "a", node_id, endpoints("a", "x"), (), 0.0)
    placed = dict.fromkeys("012", "a")

    assert seating.rebalance(placed, members, (), LATER_S) == ("0",)


def test_training_and_evaluation_are_levelled_apart() -> None:
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


def test_claims_come_back_with_surveys() -> None:
    seating = AssignmentTable()

    assert seating.rebalance({"0": "a", "1": "b"}, endpoints("ab"), (), LATER_S) == ()
    assert seating.session_counts == {"a": 1, "b": 1}


def test_seats_that_nobody_has_told_of_for_long_are_free_again() -> None:
    seating, members = AssignmentTable(), endpoints("a")
    for session in "01":
        seating.assign(session, "a", "n", members, (), 0.0)
    seating.rebalance({"1": "a"}, members, (), 500.0)

    seating.rebalance({"1": "a"}, members, (), 700.0)

    assert seating.session_counts == {"a": 1}


def test_released_seats_are_free() -> None:
    runners = Runners(AssignmentTable(), endpoints("ab"))
    runners.open("0", "a")

    runners.seating.release(["0", "stranger"])

    assert not runners.seating.session_counts


def test_a_seat_does_not_show_its_token() -> None:
    assert "secret" not in repr(Assignment("h:1", token="secret"))


ids = st.lists(st.sampled_from("abcdef"), min_size=1, unique=True).map("".join)
deals = st.lists(st.sampled_from("abcdef"), max_size=24)


def moves_needed(load: Counter[str], there: str) -> int:
    """How many sessions must leave their endpoint, so that those that are left are level."""
    base, more = divmod(load.total(), len(there))
    fullest_first = sorted((load[each] for each in there), reverse=True)
    wanted = [base + 1] * more + [base] * (len(there) - more)
    kept = sum(min(pair) for pair in zip(fullest_first, wanted, strict=True))
    return load.total() - kept


@given(ids, ids, deals)
def test_in_the_end_all_is_level_with_the_fewest_moves(
    before: str, after: str, deal: list[str]
) -> None:
    runners = Runners(AssignmentTable(), endpoints(before))
    for index, wanted in enumerate(deal):
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
    assert sum(counts) == len(deal)
    assert runners.num_moves == (moves_needed(load, after) if is_uneven else 0)
    runners.move_all()
    assert [runners.load[each] for each in after] == counts


@given(ids, ids, deals)
def test_the_same_questions_have_the_same_answers(before: str, after: str, deal: list[str]) -> None:
    def told() -> tuple[object, ...]:
        runners = Runners(AssignmentTable(), endpoints(before))
        granted = [runners.open(f"{index:02}", wanted) for index, wanted in enumerate(deal)]
        runners.members = endpoints(after)
        return granted, runners.rebalance(list(runners.placed))

    assert told() == told()


def test_a_seating_is_forgotten_when_nobody_has_been_heard_of_for_long() -> None:
    seating = AssignmentTable()
    assert seating.is_forgotten(0.0)
    seating.assign("0", "a", "n", endpoints("a"), (), 0.0)

    assert not seating.is_forgotten(600.0)
    assert seating.is_forgotten(601.0)
