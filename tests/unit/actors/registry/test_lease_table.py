"""The account of endpoints: leases, incarnations, and who holds an id."""

import pytest

from rlmesh_ray.actors.registry.lease_table import EndpointRecord, LeaseTable

LEASE_S = 15.0


@pytest.fixture
def ledger() -> LeaseTable:
    return LeaseTable()


def announce(ledger: LeaseTable, endpoint_id: str, address: str = "h:1", now_s: float = 0.0) -> int:
    return ledger.announce(endpoint_id, address, "fleet", "node", LEASE_S, now_s)


def address(ledger: LeaseTable, endpoint_id: str, now_s: float) -> str | None:
    record = ledger.lookup(endpoint_id, now_s)
    return record.address if record else None


def test_a_restarted_endpoint_is_found_at_its_new_address(ledger: LeaseTable) -> None:
    assert announce(ledger, "a", "h:1") == 1
    assert announce(ledger, "a", "h:2", now_s=1.0) == 2

    assert ledger.lookup("a", 1.0) == EndpointRecord("a", 2, "h:2", "fleet", "node")
    assert [each.address for each in ledger.members("fleet", 1.0)] == ["h:2"]


def test_an_endpoint_that_is_not_renewed_is_neither_looked_up_nor_listed(
    ledger: LeaseTable,
) -> None:
    announce(ledger, "a")
    announce(ledger, "b")

    assert ledger.renew("a", 1, 10.0)

    assert address(ledger, "a", 15.1) == "h:1"
    assert address(ledger, "b", 15.1) is None
    assert [each.endpoint_id for each in ledger.members("fleet", 15.1)] == ["a"]
    assert ledger.members("fleet", 25.1) == ()


def test_a_late_heartbeat_brings_an_endpoint_back(ledger: LeaseTable) -> None:
    announce(ledger, "a")

    assert ledger.renew("a", 1, 100.0)

    assert address(ledger, "a", 100.0) == "h:1"


def test_only_the_incarnation_that_holds_the_id_renews_it(ledger: LeaseTable) -> None:
    announce(ledger, "a", "h:1")
    announce(ledger, "a", "h:2")

    assert not ledger.renew("a", 1, 10.0)
    assert not ledger.renew("stranger", 1, 10.0)
    assert address(ledger, "a", 15.1) is None


def test_a_superseded_incarnation_does_not_come_back(ledger: LeaseTable) -> None:
    announce(ledger, "a", "old:1")
    announce(ledger, "a", "new:1")

    assert not ledger.resume(EndpointRecord("a", 1, "old:1", "fleet"), LEASE_S, 1.0)
    assert not ledger.resume(EndpointRecord("a", 1, "old:1", "fleet"), LEASE_S, 100.0)
    assert address(ledger, "a", 1.0) == "new:1"


def test_an_empty_ledger_takes_endpoints_back_with_their_incarnations() -> None:
    ledger = LeaseTable()
    record = EndpointRecord("a", 3, "h:1", "fleet", "node")

    assert ledger.resume(record, LEASE_S, 0.0)

    assert ledger.lookup("a", 0.0) == record
    assert ledger.renew("a", 3, 1.0)
    assert announce(ledger, "a", "h:2", now_s=2.0) == 4


def test_who_is_started_after_a_restart_of_the_ledger_wins_over_who_comes_back() -> None:
    ledger = LeaseTable()
    announce(ledger, "a", "new:1")  # counted from 1 again

    assert not ledger.resume(EndpointRecord("a", 3, "old:1", "fleet"), LEASE_S, 1.0)
    assert address(ledger, "a", 1.0) == "new:1"


def test_a_last_heartbeat_does_not_bring_back_what_has_been_ended(ledger: LeaseTable) -> None:
    announce(ledger, "a")
    record = ledger.lookup("a", 0.0)
    assert record

    ledger.withdraw("a", 1.0)
    ledger.withdraw("a", 1.0)

    assert not ledger.renew("a", 1, 2.0)
    assert not ledger.resume(record, LEASE_S, 2.0)
    assert ledger.members("fleet", 2.0) == ()
    assert announce(ledger, "a", "h:2", now_s=3.0) == 2


def test_an_old_incarnation_withdraws_only_itself(ledger: LeaseTable) -> None:
    announce(ledger, "a", "h:1")
    announce(ledger, "a", "h:2")

    ledger.withdraw("a", 1.0, incarnation=1)
    assert address(ledger, "a", 1.0) == "h:2"

    ledger.withdraw("a", 1.0, incarnation=2)
    assert address(ledger, "a", 1.0) is None


def test_a_suspended_endpoint_is_away_until_it_is_announced_again(ledger: LeaseTable) -> None:
    announce(ledger, "a")
    ledger.suspend("a")
    ledger.suspend("stranger")

    assert ledger.renew("a", 1, 1.0)
    assert address(ledger, "a", 1.0) is None

    announce(ledger, "a", "h:2", now_s=2.0)
    assert address(ledger, "a", 2.0) == "h:2"


def test_a_retiring_endpoint_can_be_found_but_gets_nobody_even_if_it_restarts(
    ledger: LeaseTable,
) -> None:
    announce(ledger, "a")
    ledger.retire("a")
    ledger.retire("stranger")
    announce(ledger, "a", "h:2")

    assert address(ledger, "a", 0.0) == "h:2"
    assert ledger.members("fleet", 0.0) == ()


def test_members_keep_their_order_over_restarts(ledger: LeaseTable) -> None:
    for endpoint_id in "cab":
        announce(ledger, endpoint_id)
    announce(ledger, "c", "h:2")

    assert [each.endpoint_id for each in ledger.members("fleet", 0.0)] == ["c", "a", "b"]
    assert ledger.members("other", 0.0) == ()


def test_an_endpoint_is_of_one_fleet_at_a_time(ledger: LeaseTable) -> None:
    announce(ledger, "a")

    assert ledger.announce("a", "h:2", "other", "", LEASE_S, 1.0) == 2

    assert ledger.members("fleet", 1.0) == ()
    assert len(ledger.members("other", 1.0)) == 1


def test_stale_endpoints_are_shown_for_a_while_and_then_forgotten(ledger: LeaseTable) -> None:
    announce(ledger, "a")
    ledger.renew("a", 1, 5.0, {"steps": 7})
    ledger.renew("a", 1, 10.0)

    (seen,) = ledger.entries(30.0)
    assert (seen.lease_left_s, seen.statistics) == (-5.0, {"steps": 7})

    announce(ledger, "b", now_s=700.0)
    assert [each.record.endpoint_id for each in ledger.entries(700.0)] == ["b"]
    assert announce(ledger, "a", now_s=700.0) == 1


def test_leases_may_be_without_end(ledger: LeaseTable) -> None:
    ledger.announce("a", "h:1", "fleet", "", float("inf"), 0.0)

    assert address(ledger, "a", 1e9) == "h:1"
