"""What endpoints of a pool tell: the latest, once, and from when they came."""

from dataclasses import replace

import pytest

from rlmesh_ray.actors import told as told_module
from rlmesh_ray.actors.ledger import EndpointRecord
from rlmesh_ray.actors.told import Told
from rlmesh_ray.server.counts import EnvCounts
from rlmesh_ray.server.statistics import EnvStatistics, Sighting, Statistics

RECORD = EndpointRecord("pool/games/a", 1, "192.0.2.7:5555", "pool/games")


class Meter:
    """Remembers what Ray's metrics would be given."""

    def __init__(self, record: EndpointRecord, since: Statistics | None) -> None:
        self.before = since

    def feed(self, now: Statistics) -> Sighting:
        sighting = Sighting(now, self.before)
        self.before = now
        return sighting


@pytest.fixture(autouse=True)
def meter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told_module, "Meter", Meter)


def statistics(uptime_s: float, steps: int) -> EnvStatistics:
    return replace(EnvCounts().statistics(), uptime_s=uptime_s, steps=steps)


def test_what_is_told_is_seen_once_beside_what_was_told_before() -> None:
    told, first, second = Told(), statistics(1.0, 5), statistics(4.0, 9)
    assert told.look("a", RECORD) is None

    told.note("a", first)
    assert told.look("a", RECORD) == Sighting(first, None)
    assert told.look("a", RECORD) is None
    told.note("a", second)
    assert told.look("a", RECORD) == Sighting(second, first)


def test_an_endpoint_that_has_served_before_it_came_counts_from_then() -> None:
    told, first = Told(), statistics(3600.0, 10**6)

    told.note("a", first)

    assert told.look("a", RECORD) == Sighting(first, first)


def test_another_incarnation_counts_anew() -> None:
    told, first, second = Told(), statistics(10.0, 50), statistics(1.0, 2)
    told.note("a", first)
    told.look("a", RECORD)

    told.note("a", second)

    assert told.look("a", replace(RECORD, incarnation=2)) == Sighting(second, None)


def test_nothing_is_kept_of_who_has_left() -> None:
    told = Told()
    told.note("a", statistics(1.0, 5))
    told.look("a", RECORD)
    told.note("a", statistics(4.0, 9))

    told.forget("a")

    assert told.look("a", RECORD) is None
    assert not told._latest
    assert not told._meters
