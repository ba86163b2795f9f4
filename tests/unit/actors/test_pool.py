"""Statistics of a pool's endpoints: the latest, once, from their registration on."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rlmesh_ray.actors import pool
from rlmesh_ray.actors.pool import PoolMember, PoolMembership
from rlmesh_ray.actors.registry.assignment_table import EndpointRecord
from rlmesh_ray.server.counters import EnvCounters
from rlmesh_ray.server.statistics import EnvStatistics, StatisticsPair
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.spec import DiscreteSpec

RECORD = EndpointRecord("pool/games/a", 1, "192.0.2.7:5555", "pool/games")
CONTRACT = EnvContract("Toy-v0", DiscreteSpec(2, 0), DiscreteSpec(2, 0), 1, AutoresetMode.DISABLED)


def statistics(uptime_s: float, steps: int) -> EnvStatistics:
    return replace(EnvCounters().statistics(), uptime_s=uptime_s, steps=steps)


def test_statistics_are_published_once_with_the_former_ones() -> None:
    member, first, second = PoolMember(RECORD, CONTRACT), statistics(1.0, 5), statistics(4.0, 9)
    assert member.publish() is None

    member.latest = first
    assert member.publish() == StatisticsPair(first, None)
    assert member.publish() is None
    member.latest = second
    assert member.publish() == StatisticsPair(second, first)


def test_an_endpoint_that_served_before_it_registered_counts_from_then() -> None:
    first = statistics(3600.0, 10**6)

    assert PoolMember(RECORD, CONTRACT, first).publish() == StatisticsPair(first, first)


class FakeRegistry:
    """A registry in this process that knows every endpoint, and counts the registrations."""

    def __init__(self) -> None:
        self.num_announced = 0
        self.renewed: list[tuple[int, StatisticsPair | None]] = []

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._answer(method, *arguments))

    def _answer(self, method: str, *arguments: Any) -> object:
        if method == "announce":
            self.num_announced += 1
            return self.num_announced
        if method == "renew":
            self.renewed.append(arguments[1:])
            return True
        return None


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> FakeRegistry:
    made = FakeRegistry()
    monkeypatch.setattr(pool, "shared_registry", lambda: made)
    monkeypatch.setattr(pool, "get_result", lambda answer, _timeout_s: answer)
    ray = SimpleNamespace(get=lambda answers, timeout: answers)
    monkeypatch.setattr(pool, "ray", ray)
    return made


def test_a_new_incarnation_counts_from_zero(registry: FakeRegistry) -> None:
    members, first, second = PoolMembership("games", None, None), *pair()
    members.enter("a", "192.0.2.7:5555", CONTRACT)
    members.note("a", first)
    members.renew()

    members.enter("a", "192.0.2.7:5556", CONTRACT)
    members.note("a", second)
    members.renew()

    assert registry.renewed == [
        (1, StatisticsPair(first, None)),
        (2, StatisticsPair(second, None)),
    ]


def pair() -> tuple[EnvStatistics, EnvStatistics]:
    return statistics(10.0, 50), statistics(1.0, 2)


def test_nothing_is_kept_of_an_endpoint_that_has_left(registry: FakeRegistry) -> None:
    members, first, again = PoolMembership("games", None, None), *pair()
    members.enter("a", "192.0.2.7:5555", CONTRACT)
    members.note("a", first)
    members.remove("a")
    members.note("a", first)  # a last report, which comes late

    members.enter("a", "192.0.2.7:5555", CONTRACT)
    members.renew()
    members.note("a", again)
    members.renew()

    assert registry.renewed == [(2, None), (2, StatisticsPair(again, None))]
