from dataclasses import replace

import pytest

from benchmarks.findings import Measurement
from benchmarks.processes import Reading
from benchmarks.record import ROUND_TRIP, Record, by_turns, ratios
from benchmarks.statistics import Spread
from rlmesh_ray.errors import ConfigurationError


def reading(answers_per_s: float, latencies_us: tuple[int, ...] = ()) -> Reading:
    return Reading(answers_per_s, latencies_us, (), 0.5, (0.25,), 0.0)


def test_sides_take_turns_in_going_first() -> None:
    assert [list(by_turns("ab", repetition)) for repetition in range(3)] == [
        ["a", "b"],
        ["b", "a"],
        ["a", "b"],
    ]


def test_the_first_side_is_compared_with_each_other_one() -> None:
    sides = {"ours": Spread((8.0,)), "a": Spread((2.0,)), "b": Spread((4.0,))}

    assert {name: each.median for name, each in ratios(sides).items()} == {"/ a": 4.0, "/ b": 2.0}


def test_values_of_a_side_stand_in_the_order_of_their_repetitions() -> None:
    measurements: list[Measurement] = []
    record = Record("work", measurements.append)

    for repetition, value in enumerate((3.0, 1.0)):
        record.add("case", "ours", repetition, value, "1/s", reading(value, (10, 20)))
    record.add("other case", "ours", 0, 9.0, "1/s", reading(9.0))

    assert record.sides("case")["ours"].values == (3.0, 1.0)
    assert [(each.repetition, each.value) for each in measurements] == [
        (0, 3.0),
        (1, 1.0),
        (0, 9.0),
    ]


def test_rates_have_the_processor_time_of_servers_and_clients_beside_them() -> None:
    measurements: list[Measurement] = []
    record = Record("work", measurements.append)

    for repetition, value in enumerate((2.5, 1.0)):
        record.add("case", "ours", repetition, value, "env-steps/s", reading(value))
    record.add("latency", "ours", 0, 9.0, "us a vector step", reading(9.0))

    both, server = (300_000.0, 750_000.0), (200_000.0, 500_000.0)
    assert record.sides("case") == {"ours": Spread((2.5, 1.0), both, server)}
    assert record.sides("case")["ours"].as_json()["cpu_us"] == {
        "median": 525_000.0,
        "quartiles": [412_500.0, 637_500.0],
        "values": [300_000.0, 750_000.0],
    }
    assert [each.cpu_us for each in measurements] == [*both, None]
    assert [each.server_cpu_us for each in measurements] == [*server, None]
    assert "cpu_us" not in record.sides("latency")["ours"].as_json()


def test_a_round_trip_has_the_processor_time_of_an_answer_beside_it() -> None:
    record = Record("work", lambda _: None)

    record.add("case", "ours", 0, 99.0, ROUND_TRIP, reading(2.5))

    assert record.sides("case") == {"ours": Spread((99.0,), (300_000.0,), (200_000.0,))}


def test_processor_time_is_reported_only_where_the_system_has_it_each_time() -> None:
    record = Record("work", lambda _: None)
    record.add("case", "ours", 0, 3.0, "1/s", reading(3.0))
    record.add("case", "ours", 1, 3.0, "1/s", replace(reading(3.0), server_cores=None))

    assert record.sides("case") == {"ours": Spread((3.0, 3.0))}


def test_a_side_that_cannot_tell_durations_has_none() -> None:
    measurements: list[Measurement] = []
    record = Record("work", measurements.append)

    record.add("case", "ours", 0, 5.0, "1/s", reading(5.0))
    record.add("case", "theirs", 0, 5.0, "1/s", reading(5.0, (10,)))

    assert measurements[0].latency_us is None
    assert measurements[1].latency_us is not None


def test_a_measurement_in_which_nothing_happened_is_none() -> None:
    with pytest.raises(ConfigurationError, match="no request was answered"):
        Record("work", lambda _: None).add("case", "ours", 0, 0.0, "1/s", reading(0.0))
