"""The registry: leases, incarnations, and which of them holds an id."""

from typing import Self

import pytest

from rlmesh_ray.actors.registry.assignment_table import EndpointRecord
from rlmesh_ray.actors.registry.registry_actor import EndpointRegistry
from rlmesh_ray.server.observe.counters import EnvCounters
from rlmesh_ray.server.observe.statistics import StatisticsPair

LEASE_S = 15.0
SIGHTING = StatisticsPair(EnvCounters().statistics())


class Table(EndpointRegistry):
    """A table whose clock the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(lambda: self.now_s)

    def at(self, now_s: float) -> Self:
        self.now_s = now_s
        return self


@pytest.fixture
def table() -> Table:
    return Table()


def announce(table: Table, endpoint_id: str, address: str = "h:1", now_s: float = 0.0) -> int:
    return table.at(now_s).announce(endpoint_id, address, "fleet", "node", LEASE_S)


def address(table: Table, endpoint_id: str, now_s: float) -> str | None:
    record = table.at(now_s).lookup(endpoint_id)
    return record.address if record else None


def test_a_restarted_endpoint_is_found_at_its_new_address(table: Table) -> None:
    assert announce(table, "a", "h:1") == 1
    assert announce(table, "a", "h:2", now_s=1.0) == 2

    assert table.at(1.0).lookup("a") == EndpointRecord("a", 2, "h:2", "fleet", "node")
    assert [each.address for each in table.at(1.0).members("fleet")] == ["h:2"]


def test_an_endpoint_that_is_not_renewed_is_neither_looked_up_nor_listed(
    table: Table,
) -> None:
    announce(table, "a")
    announce(table, "b")

    assert table.at(10.0).renew("a", 1)

    assert address(table, "a", 15.1) == "h:1"
    assert address(table, "b", 15.1) is None
    assert [each.endpoint_id for each in table.at(15.1).members("fleet")] == ["a"]
    assert table.at(25.1).members("fleet") == ()


def test_a_late_heartbeat_renews_an_expired_lease(table: Table) -> None:
    announce(table, "a")

    assert table.at(100.0).renew("a", 1)

    assert address(table, "a", 100.0) == "h:1"


def test_only_the_incarnation_that_holds_the_id_renews_it(table: Table) -> None:
    announce(table, "a", "h:1")
    announce(table, "a", "h:2")

    assert not table.at(10.0).renew("a", 1)
    assert not table.at(10.0).renew("stranger", 1)
    assert address(table, "a", 15.1) is None


def test_a_superseded_incarnation_cannot_resume(table: Table) -> None:
    announce(table, "a", "old:1")
    announce(table, "a", "new:1")

    assert not table.at(1.0).resume(EndpointRecord("a", 1, "old:1", "fleet"))
    assert not table.at(100.0).resume(EndpointRecord("a", 1, "old:1", "fleet"))
    assert address(table, "a", 1.0) == "new:1"


def test_endpoints_resume_at_an_empty_table_with_their_incarnations() -> None:
    table = Table()
    record = EndpointRecord("a", 3, "h:1", "fleet", "node")

    assert table.at(0.0).resume(record)

    assert table.at(0.0).lookup("a") == record
    assert table.at(1.0).renew("a", 3)
    assert announce(table, "a", "h:2", now_s=2.0) == 4


def test_an_endpoint_announced_after_a_restart_of_the_table_wins_over_one_that_resumes() -> None:
    table = Table()
    announce(table, "a", "new:1")  # counted from 1 again

    assert not table.at(1.0).resume(EndpointRecord("a", 3, "old:1", "fleet"))
    assert address(table, "a", 1.0) == "new:1"


def test_a_last_heartbeat_does_not_enter_a_withdrawn_endpoint_again(table: Table) -> None:
    announce(table, "a")
    record = table.at(0.0).lookup("a")
    assert record

    table.at(1.0).withdraw("a")
    table.at(1.0).withdraw("a")

    assert not table.at(2.0).renew("a", 1)
    assert not table.at(2.0).resume(record)
    assert table.at(2.0).members("fleet") == ()
    assert announce(table, "a", "h:2", now_s=3.0) == 2


def test_an_old_incarnation_withdraws_only_itself(table: Table) -> None:
    announce(table, "a", "h:1")
    announce(table, "a", "h:2")

    table.at(1.0).withdraw("a", incarnation=1)
    assert address(table, "a", 1.0) == "h:2"

    table.at(1.0).withdraw("a", incarnation=2)
    assert address(table, "a", 1.0) is None


def test_a_suspended_endpoint_is_not_found_until_it_is_announced_again(table: Table) -> None:
    announce(table, "a")
    table.suspend("a")
    table.suspend("stranger")

    assert table.at(1.0).renew("a", 1)
    assert address(table, "a", 1.0) is None

    announce(table, "a", "h:2", now_s=2.0)
    assert address(table, "a", 2.0) == "h:2"


def test_a_retiring_endpoint_can_be_found_but_gets_no_session_even_if_it_restarts(
    table: Table,
) -> None:
    announce(table, "a")
    table.retire("a")
    table.retire("stranger")
    announce(table, "a", "h:2")

    assert address(table, "a", 0.0) == "h:2"
    assert table.at(0.0).members("fleet") == ()


def test_members_keep_their_order_over_restarts(table: Table) -> None:
    for endpoint_id in "cab":
        announce(table, endpoint_id)
    announce(table, "c", "h:2")

    assert [each.endpoint_id for each in table.at(0.0).members("fleet")] == ["c", "a", "b"]
    assert table.at(0.0).members("other") == ()


def test_an_endpoint_is_of_one_fleet_at_a_time(table: Table) -> None:
    announce(table, "a")

    assert table.at(1.0).announce("a", "h:2", "other", "", LEASE_S) == 2

    assert table.at(1.0).members("fleet") == ()
    assert len(table.at(1.0).members("other")) == 1


def test_stale_endpoints_are_shown_for_a_while_and_then_dropped(table: Table) -> None:
    announce(table, "a")
    table.at(5.0).renew("a", 1, SIGHTING)
    table.at(10.0).renew("a", 1)

    (seen,) = table.at(30.0).overview()
    assert (seen.lease_left_s, seen.sighting) == (-5.0, SIGHTING)

    announce(table, "b", now_s=700.0)
    assert [each.endpoint_id for each in table.at(700.0).overview()] == ["b"]
    assert announce(table, "a", now_s=700.0) == 1


def test_a_lease_may_be_infinite(table: Table) -> None:
    table.announce("a", "h:1", "fleet", "", float("inf"))

    assert address(table, "a", 1e9) == "h:1"
