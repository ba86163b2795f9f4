"""The sentence of ``rlmesh-ray bench`` about what limits the rate."""

import pytest

from rlmesh_ray.cli.commands.bench import BY_ITSELF, RUNNER, what_limits

MEMORY = "shared memory"


@pytest.mark.parametrize(
    ("rates", "limit"),
    [
        (
            {BY_ITSELF: 1000.0, MEMORY: 950.0},
            "environment limits: a vector step takes it 32 ms",
        ),
        ({BY_ITSELF: 1e6, MEMORY: 2e5}, "The transport limits: shared memory adds"),
        ({BY_ITSELF: 1e6, "TCP": 1e5, MEMORY: 2e5}, "limits: shared memory adds 128 us"),
        ({BY_ITSELF: 1000.0, MEMORY: 1100.0}, "shared memory adds 0 us. More endpoints"),
    ],
)
def test_the_largest_part_of_a_step_is_named(rates: dict[str, float], limit: str) -> None:
    assert limit in what_limits(rates, 32)


def test_a_runner_is_named_where_it_takes_a_quarter_and_more() -> None:
    rates = {BY_ITSELF: 1000.0, MEMORY: 1000.0}

    assert "runner" not in what_limits({**rates, RUNNER: 800.0}, 10)
    assert "take 10 ms more: train with more runners" in what_limits({**rates, RUNNER: 500.0}, 10)
