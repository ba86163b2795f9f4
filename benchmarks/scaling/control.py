"""What many endpoints cost the control plane: runner, registry, fleet, Ray."""

import json
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.findings import Finding
from benchmarks.processes import Process
from benchmarks.scaling.listener import OURS, SIMULATOR, START_S
from benchmarks.scaling.plan import Part, ScalingPlan
from benchmarks.statistics import Spread

_RUN = (sys.executable, "-m", "benchmarks.scaling.control_run")
_STEP_S = 1.0
_OBSERVATION_BYTES = 16
_FRAGMENT = 5
_START_S_EACH = 10.0
"""How long an endpoint may take to start, on a machine with much else to do."""


def measure_control(plan: ScalingPlan) -> list[Finding]:
    """Measure once what a fleet, the registry and one runner with many endpoints cost.

    Args:
        plan: How many.

    Raises:
        EndpointError: The process failed.
    """
    size = plan.control
    task = {
        "env": SIMULATOR,
        "env_kwargs": {
            "num_envs": size.lanes,
            "step_s": _STEP_S,
            "observation_bytes": _OBSERVATION_BYTES,
        },
        "num_endpoints": size.endpoints,
        "fleet": size.fleet,
        "records": size.records,
        "fragment": _FRAGMENT,
        "seconds": plan.seconds,
    }
    found: dict[str, Any] = {}
    with Process("the run of many endpoints", _RUN) as run:
        run.send(json.dumps(task))
        while "ended" not in (message := run.receive(START_S + _START_S_EACH * size.endpoints)):
            found.update(message)
    return control_findings(found["fleet"], found["registry"], found["rollout"])


def control_findings(
    fleet: Mapping[str, float], registry: Mapping[str, float], rollout: Mapping[str, Any]
) -> list[Finding]:
    """Return a line for each figure.

    Args:
        fleet: As ``benchmarks.scaling.control_run`` reports it.
        registry: Likewise.
        rollout: Likewise.
    """
    of_fleet = f"fleet of {fleet['endpoints']:,.0f}"
    of_registry = f"registry with {registry['records']:,.0f} records"
    of_rollout = f"{rollout['endpoints']:,} endpoints, {rollout['lanes']:,} lanes"
    lines = [
        (f"{of_fleet}: start", "s", fleet["start_s"]),
        (f"{of_fleet}: memory of an actor", "MB", fleet["actor_mb"]),
        (f"{of_fleet}: memory of a session's worker", "MB", fleet["worker_mb"]),
        (f"{of_registry}: memory without them", "MB", registry["memory_mb"]),
        (f"{of_registry}: what they take", "MB", registry["records_mb"]),
        (f"{of_registry}: announcements", "1/s", registry["announces_per_s"]),
        (f"{of_registry}: processor time of an announcement", "us", registry["announce_cpu_us"]),
        (f"{of_registry}: look-ups", "1/s", registry["lookups_per_s"]),
        (f"{of_registry}: processor time of a look-up", "us", registry["lookup_cpu_us"]),
        (f"{of_registry}: a look-up alone", "ms", registry["lookup_alone_ms"]),
        (f"{of_rollout}: start of the endpoints, in 2 actors", "s", rollout["serve_s"]),
        (f"{of_rollout}: configure", "s", rollout["configure_s"]),
        (f"{of_rollout}: runner's start, all sessions opened", "s", rollout["open_s"]),
        (f"{of_rollout}: first steps of all", "s", rollout["first_steps_s"]),
        (f"{of_rollout}: threads of the runner", "threads", rollout["threads"]),
        (f"{of_rollout}: sampled", "env-steps/s", rollout["steps_per_s"]),
    ]
    for name, memory_mb in rollout["memory_mb"].items():
        lines.append((f"{of_rollout}: {name}, memory", "MB", memory_mb))
        lines.append((f"{of_rollout}: {name}, idle", "cores", rollout["idle_cores"][name]))
        lines.append((f"{of_rollout}: {name}, sampling", "cores", rollout["busy_cores"][name]))
    return [
        Finding(Part.CONTROL, case, unit, {OURS: Spread((float(value),))})
        for case, unit, value in lines
    ]
