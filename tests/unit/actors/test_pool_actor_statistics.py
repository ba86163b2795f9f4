"""Statistics of a pool's endpoints: the latest, once, from their registration on."""

from dataclasses import replace

from rlmesh_ray.actors.pool_actor import ReportedStatistics
from rlmesh_ray.actors.registry.lease_table import EndpointRecord
from rlmesh_ray.server.counters import EnvCounters
from rlmesh_ray.server.statistics import EnvStatistics, StatisticsPair

RECORD = EndpointRecord("pool/games/a", 1, "192.0.2.7:5555", "pool/games")


def statistics(uptime_s: float, steps: int) -> EnvStatistics:
    return replace(EnvCounters().statistics(), uptime_s=uptime_s, steps=steps)


def test_statistics_are_published_once_with_the_former_ones() -> None:
    reported, first, second = ReportedStatistics(), statistics(1.0, 5), statistics(4.0, 9)
    assert reported.publish("a", RECORD) is None

    reported.note("a", first)
    assert reported.publish("a", RECORD) == StatisticsPair(first, None)
    assert reported.publish("a", RECORD) is None
    reported.note("a", second)
    assert reported.publish("a", RECORD) == StatisticsPair(second, first)


def test_an_endpoint_that_served_before_it_registered_counts_from_then() -> None:
    reported, first = ReportedStatistics(), statistics(3600.0, 10**6)

    reported.note("a", first)

    assert reported.publish("a", RECORD) == StatisticsPair(first, first)


def test_a_new_incarnation_counts_from_zero() -> None:
    reported, first, second = ReportedStatistics(), statistics(10.0, 50), statistics(1.0, 2)
    reported.note("a", first)
    reported.publish("a", RECORD)

    reported.note("a", second)

    assert reported.publish("a", replace(RECORD, incarnation=2)) == StatisticsPair(second, None)


def test_nothing_is_kept_of_an_endpoint_that_has_left() -> None:
    reported, again = ReportedStatistics(), statistics(1.0, 2)
    reported.note("a", statistics(1.0, 5))
    reported.publish("a", RECORD)
    reported.note("a", statistics(4.0, 9))

    reported.forget("a")

    assert reported.publish("a", RECORD) is None
    reported.note("a", again)
    assert reported.publish("a", RECORD) == StatisticsPair(again, None)
