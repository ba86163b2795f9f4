"""Statistics of a pool's endpoints: the latest, once, from their registration on."""

from dataclasses import replace

from rlmesh_ray.actors.pool import PoolMember
from rlmesh_ray.actors.registry.assignment_table import EndpointRecord
from rlmesh_ray.server.observe.counters import EnvCounters
from rlmesh_ray.server.observe.statistics import EnvStatistics, StatisticsPair
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


def test_a_new_registration_counts_from_zero() -> None:
    first, second = statistics(10.0, 50), statistics(1.0, 2)
    PoolMember(RECORD, CONTRACT, first).publish()

    again = PoolMember(replace(RECORD, incarnation=2), CONTRACT, second)

    assert again.publish() == StatisticsPair(second, None)
