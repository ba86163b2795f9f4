"""How rollouts grow with endpoints, how endpoints come and go, and what keeping many costs."""

from collections.abc import Iterator

from benchmarks.findings import Finding
from benchmarks.scaling.control import measure_control
from benchmarks.scaling.listener import Listener
from benchmarks.scaling.membership import measure_membership
from benchmarks.scaling.plan import Part, ScalingPlan
from benchmarks.scaling.rates import measure_rates


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
