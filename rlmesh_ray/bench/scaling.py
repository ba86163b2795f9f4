"""How rollouts grow with endpoints, how endpoints come and go, and what keeping many costs."""

from collections.abc import Iterator

from rlmesh_ray.bench.findings import Finding
from rlmesh_ray.bench.scaling_control import measure_control
from rlmesh_ray.bench.scaling_listener import Listener
from rlmesh_ray.bench.scaling_membership import measure_membership
from rlmesh_ray.bench.scaling_plan import Part, ScalingPlan
from rlmesh_ray.bench.scaling_rates import measure_rates


def measure_scaling(plan: ScalingPlan, listener: Listener) -> Iterator[list[Finding]]:
    """Measure all of ``plan``; yield what was found, one part after the other.

    Args:
        plan: What to measure.
        listener: Hears of it meanwhile.

    Raises:
        EndpointError: A process failed.
    """
    for part in plan.parts:
        match part:
            case Part.RATES:
                yield measure_rates(plan, listener)
            case Part.MEMBERSHIP:
                yield measure_membership(plan, listener)
            case Part.CONTROL:
                yield measure_control(plan)
