"""How the cost of one vector step grows: with lanes, endpoints, and the size of observations.

The median step of each measurement counts. Every measurement has fresh processes; the sides take
turns in going first.
"""

from collections.abc import Iterator

from benchmarks.findings import Finding
from benchmarks.growth.plan import Axis, GrowthPlan, case
from benchmarks.record import Note, Record, by_turns, ratios
from benchmarks.statistics import percentiles
from benchmarks.stepping.specs import CARTPOLE, FRAMES, ClientSpec, Mode, ServerSpec
from benchmarks.stepping.targets import Target

MEMORY, TCP, SYNC = "shared memory", "TCP", "SyncVectorEnv"
"""The sides; the first two are ours."""
UNIT = "us a vector step"

_LANES_EACH = 8


def measure_growth(plan: GrowthPlan, note: Note) -> Iterator[list[Finding]]:
    """Measure all of ``plan``; yield what was found, one axis after the other.

    Args:
        plan: What to measure.
        note: Gets every single measurement when it is made.

    Raises:
        EndpointError: A process failed.
    """
    for axis in plan.axes:
        record = Record(axis, note)
        for point in plan.points(axis):
            sides = targets(axis, point, plan)
            for repetition in range(plan.repetitions):
                for side in by_turns(sides, repetition):
                    reading = side.measure()
                    median_us = percentiles(reading.latencies_us).p50
                    record.add(case(axis, point), side.name, repetition, median_us, UNIT, reading)
        found = [
            (case(axis, point), record.sides(case(axis, point))) for point in plan.points(axis)
        ]
        yield [Finding(axis, name, UNIT, sides, ratios(sides)) for name, sides in found]


def targets(axis: Axis, point: int, plan: GrowthPlan) -> list[Target]:
    """Return the targets at a point: through memory, through messages, and in one process."""
    num_endpoints, server_spec = _server_spec(axis, point)
    # An endpoint of a single lane resets only on request, as RemoteEnv does.
    mode = Mode.SINGLE if server_spec.num_envs == 1 else Mode.VECTOR
    ours = [
        Target(
            name,
            ClientSpec(mode, plan.warm_up_s, plan.seconds, transport=transport),
            (server_spec,) * num_endpoints,
        )
        for name, transport in ((MEMORY, "shared_memory"), (TCP, "tcp"))
    ]
    local = ClientSpec(
        Mode.SYNC,
        plan.warm_up_s,
        plan.seconds,
        env=server_spec.env,
        num_envs=num_endpoints * server_spec.num_envs,
        env_kwargs=server_spec.env_kwargs,
    )
    return [*ours, Target(SYNC, local)]


def _server_spec(axis: Axis, point: int) -> tuple[int, ServerSpec]:
    """Return how many endpoints there are, and what each one hosts."""
    match axis:
        case Axis.LANES:
            return 1, ServerSpec(CARTPOLE, point)
        case Axis.ENDPOINTS:
            return point, ServerSpec(CARTPOLE, _LANES_EACH)
        case Axis.OBSERVATION:
            kwargs = {"shape": (point,), "step_s": 0.0}
            return 1, ServerSpec(FRAMES, _LANES_EACH, kwargs)
