import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.findings import Measurement
from benchmarks.scaling.control import control_findings
from benchmarks.scaling.listener import Placed
from benchmarks.scaling.membership import longest_pause_s, others_at_full_rate
from benchmarks.scaling.plan import Part, ScalingPlan, Setup, Simulation, Transport
from benchmarks.scaling.plot import draw
from benchmarks.scaling.rates import rate_findings
from benchmarks.scaling.report import caveats, places
from benchmarks.statistics import Spread
from rlmesh_ray.errors import ConfigurationError

ONE, SIXTEEN = Setup(1, 1), Setup(16, 1)
PLACED = Placed(ONE.case, 0, 0.5, 1, (1,), 3.0, 4.0, None)
MEASURED = Measurement(
    workload=Part.RATES,
    case=ONE.case,
    side="rlmesh-ray",
    repetition=0,
    value=400.0,
    unit="env-steps/s",
    latency_us=None,
    lag_us=None,
    server_cores=0.1,
    client_cores=(0.1,),
    other_cores=0.0,
)


# --- what is measured --------------------------------------------------------------------


def test_one_to_sixteen_endpoints_are_measured_on_one_node_and_on_several() -> None:
    setups = ScalingPlan().setups

    assert [each.num_endpoints for each in setups] == [1, 2, 4, 8, 16] * 2
    assert [each.num_nodes for each in setups] == [1] * 5 + [4] * 5
    assert {each.num_runners for each in setups} == {1}


def test_one_endpoint_steps_eight_lanes_in_twenty_milliseconds() -> None:
    simulation = Simulation()

    assert (simulation.lanes, simulation.observation_bytes) == (8, 4096)
    assert simulation.steps_per_s == pytest.approx(400.0)


def test_one_endpoint_with_one_runner_is_measured_everywhere_asked_for_or_not() -> None:
    plan = ScalingPlan(endpoints=(4, 8), nodes=(1, 2), runners=(2,))

    assert plan.setups == [
        *(Setup(1, 1), Setup(4, 1, 2), Setup(8, 1, 2)),
        *(Setup(1, 2), Setup(4, 2, 2), Setup(8, 2, 2)),
    ]


def test_runners_get_only_endpoints_that_can_be_shared_evenly() -> None:
    plan = ScalingPlan(endpoints=(1, 2, 4, 6), nodes=(1,), runners=(4,))

    assert plan.setups == [ONE, Setup(4, 1, 4)]


def test_several_nodes_of_one_machine_do_without_its_memory() -> None:
    assert Setup(2, 1).transport is Transport.MEMORY
    assert Setup(2, 4).transport is Transport.MESSAGES
    assert Setup(2, None).transport is Transport.FOUND


def test_names_of_setups_differ() -> None:
    assert ONE.case == "1 node, 1 endpoint"
    assert Setup(16, 4, 2).case == "4 nodes, 2 runners, 16 endpoints"
    assert Setup(2, None).case == "the cluster, 2 endpoints"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"endpoints": (1, 0)}, "--endpoints must be 1 or more"),
        ({"nodes": (0,)}, "--nodes must be 1 or more"),
        ({"runners": (-1,)}, "--runners must be 1 or more"),
        ({"runners": (3,)}, "multiple of 3 --endpoints"),
        ({"ray_address": "10.0.0.1:6379"}, "give one of the two"),
        ({"ray_address": "10.0.0.1:6379", "nodes": ()}, "--only rates or --only membership"),
    ],
)
def test_what_cannot_be_measured_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ScalingPlan(**wrong)


def test_a_cluster_that_runs_already_has_its_own_nodes() -> None:
    plan = ScalingPlan(parts=(Part.RATES,), endpoints=(1, 2), nodes=(), ray_address="10.0.0.1:6379")

    assert plan.setups == [Setup(1, None), Setup(2, None)]


# --- efficiency --------------------------------------------------------------------------


def test_efficiency_is_the_rate_by_as_many_times_one_endpoint_of_the_same_repetition() -> None:
    measured = {ONE: Spread((400.0, 380.0)), SIXTEEN: Spread((5760.0, 4864.0))}

    one, sixteen = rate_findings(measured, 400.0)

    assert one.comparisons["/ ideal"].values == (1.0, 1.0)
    assert sixteen.sides["ideal"].values == (6400.0, 6080.0)
    assert sixteen.comparisons["/ ideal"].values == pytest.approx((0.9, 0.8))
    assert sixteen.comparisons["/ sleep alone"].values == pytest.approx((0.9, 0.76))


def test_the_goal_is_for_sixteen_endpoints_and_judged_by_the_median() -> None:
    one = Spread((400.0,) * 3)
    good = rate_findings({ONE: one, SIXTEEN: Spread((5800.0, 5760.0, 10.0))}, 400.0)
    bad = rate_findings({ONE: one, SIXTEEN: Spread((5800.0, 5700.0, 10.0))}, 400.0)

    assert [each.is_met for each in good] == [None, True]
    assert [each.is_met for each in bad] == [None, False]


def test_every_place_and_number_of_runners_has_the_ideal_of_its_place() -> None:
    shared = Setup(2, 4, 2)
    measured = {
        ONE: Spread((400.0,)),
        Setup(1, 4): Spread((300.0,)),
        shared: Spread((450.0,)),
    }

    *_, found = rate_findings(measured, 400.0)

    assert found.case == shared.case
    assert found.comparisons["/ ideal"].values == (0.75,)


# --- losing and joining ------------------------------------------------------------------


def steps(endpoint: int, since_s: float, until_s: float, gap_s: float) -> list[tuple[float, int]]:
    count = round((until_s - since_s) / gap_s)
    return [(since_s + number * gap_s, endpoint) for number in range(count)]


def test_others_who_go_on_were_never_slower() -> None:
    trace = sorted([*steps(0, -2.0, 0.0, 0.02), *steps(1, -2.0, 5.0, 0.02)])

    found = others_at_full_rate(trace, lost={0})

    assert found.is_seen
    assert found.after_s == 0.0
    assert longest_pause_s(trace, {0}, 1.0) == pytest.approx(0.02)


def test_others_who_stop_for_a_while_are_back_when_they_are_back() -> None:
    trace = sorted(
        [
            *steps(0, -2.0, 5.0, 0.005),  # its replacement is fast, which is none of theirs
            *steps(1, -2.0, 0.0, 0.02),
            *steps(1, 1.5, 5.0, 0.02),
        ]
    )

    found = others_at_full_rate(trace, lost={0})

    assert found.is_seen
    assert found.after_s == pytest.approx(1.5)
    assert longest_pause_s(trace, {0}, 3.0) == pytest.approx(1.5)


def test_sessions_that_stay_slow_are_distinguished_from_those_that_recover() -> None:
    trace = sorted([*steps(1, -2.0, 0.0, 0.02), *steps(1, 0.0, 5.0, 0.04)])

    found = others_at_full_rate(trace, lost={0})

    assert not found.is_seen
    assert found.after_s == pytest.approx(trace[-1][0] - 1.0)


# --- reports -----------------------------------------------------------------------------


def test_nothing_is_doubted_where_everything_was_as_asked() -> None:
    plan = ScalingPlan(endpoints=(1,), nodes=(1,))

    assert caveats([PLACED], [MEASURED], plan) == []


def test_nodes_of_one_machine_are_distinguished_from_machines() -> None:
    (doubt,) = caveats([], [], ScalingPlan(endpoints=(1,), nodes=(2,)))

    assert "on this one machine" in doubt


def test_endpoints_that_are_not_where_they_were_asked_for_are_reported() -> None:
    plan = ScalingPlan(endpoints=(1, 4), nodes=(4,))
    placed = replace(PLACED, case=Setup(4, 4).case, num_nodes=4, endpoints_by_node=(3, 1))

    found = caveats([placed], [], plan)

    assert any("on 2 node(s), asked for were 4" in doubt for doubt in found)


def test_a_runner_that_is_the_limit_is_reported() -> None:
    plan = ScalingPlan(endpoints=(1,), nodes=(1,))
    busy = replace(MEASURED, client_cores=(0.3, 0.9))

    found = caveats([PLACED], [busy], plan)

    assert any("is the limit itself" in doubt and ONE.case in doubt for doubt in found)


def test_runners_that_do_not_take_the_fast_path_are_reported() -> None:
    plan = ScalingPlan(endpoints=(1,), nodes=(1,))

    found = caveats([replace(PLACED, one_by_one="there is no module")], [MEASURED], plan)

    assert found == ["runners do not take the fast path: there is no module"]


def test_the_load_before_and_the_place_of_endpoints_are_shown() -> None:
    text = io.StringIO()
    placed = replace(PLACED, load_average=7.25, num_nodes=4, endpoints_by_node=(5, 4, 4, 3))

    Console(file=text, width=200).print(places([placed]))

    assert "7.2" in text.getvalue()
    assert "5+4+4+3" in text.getvalue()


def test_rates_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "new" / "scaling.png"
    plan = ScalingPlan(endpoints=(1, 16))
    measured = {
        setup: Spread((390.0 * setup.num_endpoints, 400.0 * setup.num_endpoints))
        for setup in plan.setups
    }

    draw(rate_findings(measured, 400.0), plan.setups, path)

    assert path.read_bytes().startswith(b"\x89PNG")


def test_each_cost_of_control_has_its_unit() -> None:
    fleet = {"endpoints": 10, "start_s": 5.0, "actor_mb": 90.0, "worker_mb": 30.0}
    registry = {
        "records": 10_000,
        "memory_mb": 80.0,
        "records_mb": 9.0,
        "announces_per_s": 2_000.0,
        "announce_cpu_us": 200.0,
        "lookups_per_s": 3_000.0,
        "lookup_cpu_us": 300.0,
        "lookup_alone_ms": 1.0,
    }
    rollout = {
        "endpoints": 100,
        "lanes": 10_000,
        "serve_s": 40.0,
        "configure_s": 1.0,
        "open_s": 8.0,
        "first_steps_s": 2.0,
        "threads": 110,
        "steps_per_s": 9_000.0,
        "memory_mb": {"runner": 400.0, "registry": 90.0},
        "idle_cores": {"runner": 0.0, "registry": 0.0},
        "busy_cores": {"runner": 0.5, "registry": 0.0},
    }

    found = {each.case: each for each in control_findings(fleet, registry, rollout)}

    memory = found["100 endpoints, 10,000 lanes: runner, memory"]
    assert (memory.unit, memory.sides["rlmesh-ray"].median) == ("MB", 400.0)
    assert found["100 endpoints, 10,000 lanes: runner, sampling"].unit == "cores"
    assert found["registry with 10,000 records: what they take"].unit == "MB"
    assert found["fleet of 10: start"].unit == "s"
