"""The lease table: leases, incarnations, and which of them holds an id."""

import pytest

from rlmesh_ray.actors.registry.lease_table import EndpointRecord, LeaseTable

LEASE_S = 15.0


@pytest.fixture
def table() -> LeaseTable:
    return LeaseTable()


def announce(table: LeaseTable, endpoint_id: str, address: str = "h:1", now_s: float = 0.0) -> int:
    return table.announce(endpoint_id, address, "fleet", "node", LEASE_S, now_s)


def address(table: LeaseTable, endpoint_id: str, now_s: float) -> str | None:
    record = table.lookup(endpoint_id, now_s)
    return record.address if record else None


def test_a_restarted_endpoint_is_found_at_its_new_address(table: LeaseTable) -> None:
    assert announce(table, "a", "h:1") == 1
    assert announce(table, "a", "h:2", now_s=1.0) == 2

    assert table.lookup("a", 1.0) == EndpointRecord("a", 2, "h:2", "fleet", "node")
    assert [each.address for each in table.members("fleet", 1.0)] == ["h:2"]


def test_an_endpoint_that_is_not_renewed_is_neither_looked_up_nor_listed(
    table: LeaseTable,
) -> None:
    announce(table, "a")
    announce(table, "b")

    assert table.renew("a", 1, 10.0)

    assert address(table, "a", 15.1) == "h:1"
    assert address(table, "b", 15.1) is None
    assert [each.endpoint_id for each in table.members("fleet", 15.1)] == ["a"]
    assert table.members("fleet", 25.1) == ()


def test_a_late_heartbeat_renews_an_expired_lease(table: LeaseTable) -> None:
    announce(table, "a")

    assert table.renew("a", 1, 100.0)

    assert address(table, "a", 100.0) == "h:1"


def test_only_the_incarnation_that_holds_the_id_renews_it(table: LeaseTable) -> None:
    announce(table, "a", "h:1")
    announce(table, "a", "h:2")

    assert not table.renew("a", 1, 10.0)
    assert not table.renew("stranger", 1, 10.0)
    assert address(table, "a", 15.1) is None


def test_a_superseded_incarnation_cannot_resume(table: LeaseTable) -> None:
    announce(table, "a", "old:1")
    announce(table, "a", "new:1")

    assert not table.resume(EndpointRecord("a", 1, "old:1", "fleet"), LEASE_S, 1.0)
    assert not table.resume(EndpointRecord("a", 1, "old:1", "fleet"), LEASE_S, 100.0)
    assert address(table, "a", 1.0) == "new:1"


def test_endpoints_resume_at_an_empty_table_with_their_incarnations() -> None:
    table = LeaseTable()
    record = EndpointRecord("a", 3, "h:1", "fleet", "node")

    assert table.resume(record, LEASE_S, 0.0)

    assert table.lookup("a", 0.0) == record
    assert table.renew("a", 3, 1.0)
    assert announce(table, "a", "h:2", now_s=2.0) == 4


def test_an_endpoint_announced_after_a_restart_of_the_table_wins_over_one_that_resumes() -> None:
    table = LeaseTable()
    announce(table, "a", "new:1")  # counted from 1 again

    assert not table.resume(EndpointRecord("a", 3, "old:1", "fleet"), LEASE_S, 1.0)
    assert address(table, "a", 1.0) == "new:1"


def test_a_last_heartbeat_does_not_enter_a_withdrawn_endpoint_again(table: LeaseTable) -> None:
    announce(table, "a")
    record = table.lookup("a", 0.0)
    assert record

    table.withdraw("a", 1.0)
    table.withdraw("a", 1.0)

    assert not table.renew("a", 1, 2.0)
    assert not table.resume(record, LEASE_S, 2.0)
    assert table.members("fleet", 2.0) == ()
    assert announce(table, "a", "h:2", now_s=3.0) == 2


def test_an_old_incarnation_withdraws_only_itself(table: LeaseTable) -> None:
    announce(table, "a", "h:1")
    announce(table, "a", "h:2")

    table.withdraw("a", 1.0, incarnation=1)
    assert address(table, "a", 1.0) == "h:2"

    table.withdraw("a", 1.0, incarnation=2)
    assert address(table, "a", 1.0) is None


def test_a_suspended_endpoint_is_not_found_until_it_is_announced_again(table: LeaseTable) -> None:
    announce(table, "a")
    table.suspend("a")
    table.suspend("stranger")

    assert table.renew("a", 1, 1.0)
    assert address(table, "a", 1.0) is None

    announce(table, "a", "h:2", now_s=2.0)
    assert address(table, "a", 2.0) == "h:2"


def test_a_retiring_endpoint_can_be_found_but_gets_no_session_even_if_it_restarts(
    table: LeaseTable,
) -> None:
    announce(table, "a")
    table.retire("a")
    table.retire("stranger")
    announce(table, "a", "h:2")

    assert address(table, "a", 0.0) == "h:2"
    assert table.members("fleet", 0.0) == ()


def test_members_keep_their_order_over_restarts(table: LeaseTable) -> None:
    for endpoint_id in "cab":
        announce(table, endpoint_id)
    announce(table, "c", "h:2")

    assert [each.endpoint_id for each in table.members("fleet", 0.0)] == ["c", "a", "b"]
    assert table.members("other", 0.0) == ()


def test_an_endpoint_is_of_one_fleet_at_a_time(table: LeaseTable) -> None:
    announce(table, "a")

    assert table.announce("a", "h:2", "other", "", LEASE_S, 1.0) == 2

    assert table.members("fleet", 1.0) == ()
    assert len(table.members("other", 1.0)) == 1


def test_stale_endpoints_are_shown_for_a_while_and_then_dropped(table: LeaseTable) -> None:
    announce(table, "a")
    table.renew("a", 1, 5.0, {"steps": 7})
    table.renew("a", 1, 10.0)

    (seen,) = table.entries(30.0)
    assert (seen.lease_left_s, seen.statistics) == (-5.0, {"steps": 7})

    announce(table, "b", now_s=700.0)
    assert [each.record.endpoint_id for each in table.entries(700.0)] == ["b"]
    assert announce(table, "a", now_s=700.0) == 1


def test_a_lease_may_be_infinite(table: LeaseTable) -> None:
    table.announce("a", "h:1", "fleet", "", float("inf"), 0.0)

    assert address(table, "a", 1e9) == "h:1"
