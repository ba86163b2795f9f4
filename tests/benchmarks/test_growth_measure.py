from pathlib import Path

import pytest

from benchmarks.findings import Measurement
from benchmarks.growth.measure import measure_growth, targets
from benchmarks.growth.plan import FEW_POINTS, POINTS, Axis, GrowthPlan, case
from benchmarks.growth.plot import draw
from benchmarks.processes import Reading
from benchmarks.stepping.specs import FRAMES, Mode
from benchmarks.stepping.targets import Target

PLAN = GrowthPlan(is_sparse=True, repetitions=2)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def durations(self: Target) -> Reading:
        lanes = (
            self.client_spec.num_envs
            if self.client_spec.mode is Mode.SYNC
            else self.server_specs[0].num_envs
        )
        return Reading(1.0, (lanes, 10 * lanes, 1000 * lanes), (), None, (1.0,), None)

    monkeypatch.setattr(Target, "measure", durations)


def test_the_points_reach_as_far_as_they_shall() -> None:
    for points in (POINTS, FEW_POINTS):
        assert points[Axis.LANES][0] == 1
        assert points[Axis.LANES][-1] == 1024
        assert points[Axis.OBSERVATION][0] == 16
        assert points[Axis.OBSERVATION][-1] == 2**20
    assert (POINTS[Axis.ENDPOINTS][0], POINTS[Axis.ENDPOINTS][-1]) == (1, 16)


def test_points_have_names_that_differ() -> None:
    assert case(Axis.LANES, 1) == "1 lane"
    assert case(Axis.LANES, 1024) == "1,024 lanes"
    assert case(Axis.ENDPOINTS, 4) == "4 endpoints"
    assert case(Axis.OBSERVATION, 2**20) == "1,048,576 bytes"


def test_many_endpoints_have_as_many_lanes_as_the_process_itself() -> None:
    memory, tcp, local = targets(Axis.ENDPOINTS, 4, PLAN)

    assert [len(each.server_specs) for each in (memory, tcp, local)] == [4, 4, 0]
    assert (
        sum(server_spec.num_envs for server_spec in memory.server_specs)
        == local.client_spec.num_envs
        == 32
    )
    assert (memory.client_spec.transport, tcp.client_spec.transport) == ("shared_memory", "tcp")


def test_large_observations_are_the_same_on_all_sides() -> None:
    memory, _, local = targets(Axis.OBSERVATION, 4096, PLAN)

    assert memory.server_specs[0].env == local.client_spec.env == FRAMES
    assert memory.server_specs[0].env_kwargs == local.client_spec.env_kwargs
    assert local.client_spec.env_kwargs["shape"] == (4096,)


def test_a_single_lane_is_stepped_as_such() -> None:
    assert targets(Axis.LANES, 1, PLAN)[0].client_spec.mode is Mode.SINGLE
    assert targets(Axis.LANES, 4, PLAN)[0].client_spec.mode is Mode.VECTOR


@pytest.mark.usefixtures("measured")
def test_the_median_step_counts() -> None:
    measurements: list[Measurement] = []

    (lanes,) = measure_growth(GrowthPlan([Axis.LANES], is_sparse=True), measurements.append)

    assert [each.sides["shared memory"].median for each in lanes] == [10, 320, 10240]
    assert {each.unit for each in measurements} == {"us a vector step"}


@pytest.mark.usefixtures("measured")
def test_what_was_measured_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "new" / "growth.png"
    plan = GrowthPlan([Axis.ENDPOINTS, Axis.LANES], is_sparse=True, repetitions=2)
    (endpoints, _) = measure_growth(plan, lambda _: None)

    draw(endpoints, plan, path)  # interrupted after the first axis

    assert path.read_bytes().startswith(b"\x89PNG")
