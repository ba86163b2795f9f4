"""What losing and joining an endpoint costs."""

import itertools
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.findings import Finding
from benchmarks.processes import Process
from benchmarks.scaling.listener import OURS, SIMULATOR, START_S, Listener
from benchmarks.scaling.plan import Part, ScalingPlan
from benchmarks.statistics import Spread

WINDOW_S = 1.0
"""Over which a rate is looked at."""
FULL = 0.9
"""Of the rate before, which counts as full."""
LOST, PAUSE, BACK, SERVES, JOINED = (
    f"one lost: until the others sample at {FULL:.0%} of their rate before",
    "one lost: longest pause of the others until then",
    "one lost: until its sessions sample again",
    "one more by scale(): until it serves",
    "one more by scale(): until it samples",
)

_RUN = (sys.executable, "-m", "benchmarks.scaling.membership_run")
_WATCH_S = 3.0

Steps = Sequence[tuple[float, int]]
"""When a step came, in seconds since the stroke, and which session gave it; in order."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """When something was as before."""

    after_s: float
    is_seen: bool
    """Whether it was; else it had not by the end of the measurement, which was after this time."""


def others_at_full_rate(steps: Steps, lost: Collection[int]) -> Recovered:
    """Return when the other sessions give as many steps as before the stroke, or nearly so.

    Args:
        steps: Before and after it, for longer than a window each.
        lost: Those that were at the endpoint that was struck.
    """
    others = [at_s for at_s, session in steps if session not in lost]
    before = [at_s for at_s in others if at_s < 0.0]
    after = [at_s for at_s in others if at_s >= 0.0]
    wanted = FULL * WINDOW_S * len(before) / -steps[0][0]
    last_s = steps[-1][0] - WINDOW_S
    for start_s in (0.0, *after):
        if start_s > last_s:
            break
        if sum(start_s <= at_s < start_s + WINDOW_S for at_s in after) >= wanted:
            return Recovered(start_s, is_seen=True)
    return Recovered(max(last_s, 0.0), is_seen=False)


def longest_pause_s(steps: Steps, lost: Collection[int], until_s: float) -> float:
    """Return the longest time in which no other session gave a step, after the stroke.

    Args:
        steps: As of ``others_at_full_rate``.
        lost: Likewise.
        until_s: How long after the stroke is looked at.
    """
    others = [at_s for at_s, session in steps if session not in lost and 0.0 <= at_s < until_s]
    ends = [0.0, *others, until_s]
    return max(later - earlier for earlier, later in itertools.pairwise(ends))


def measure_membership(plan: ScalingPlan, listener: Listener) -> list[Finding]:
    """Kill an endpoint under a runner, and scale its fleet, again and again.

    Args:
        plan: How often, with how many endpoints.
        listener: Hears of it meanwhile.

    Raises:
        EndpointError: The process failed.
    """
    found: dict[str, list[float]] = {LOST: [], PAUSE: [], BACK: [], SERVES: [], JOINED: []}
    with Process("the run of lost endpoints", _RUN) as run:
        run.send(json.dumps(_task(plan)))
        while "ended" not in (message := run.receive(START_S)):
            if "lost" in message:
                _add_lost(found, message["lost"], listener)
            elif "joined" in message:
                found[SERVES].append(message["joined"]["serves_s"])
                found[JOINED].append(message["joined"]["samples_s"])
    case = f"{plan.members} endpoints"
    return [
        Finding(Part.MEMBERSHIP, f"{case}, {what}", "s", {OURS: Spread(tuple(values))})
        for what, values in found.items()
    ]


def _add_lost(
    found: dict[str, list[float]], message: Mapping[str, Any], listener: Listener
) -> None:
    steps = [(at_s, session) for at_s, session in message["steps"]]
    recovered = others_at_full_rate(steps, message["lost"])
    if not recovered.is_seen:
        listener.doubt(
            f"after an endpoint was lost, the others did not get back to {FULL:.0%} of their rate "
            f"before in the {recovered.after_s:.1f} s that were watched: repeat on a quiet machine"
        )
    found[LOST].append(recovered.after_s)
    found[PAUSE].append(longest_pause_s(steps, message["lost"], recovered.after_s + WINDOW_S))
    found[BACK].append(message["back_s"])


def _task(plan: ScalingPlan) -> dict[str, object]:
    simulation = plan.simulation
    return {
        "env": SIMULATOR,
        "env_kwargs": {
            "num_envs": simulation.lanes,
            "step_s": simulation.step_s,
            "observation_bytes": simulation.observation_bytes,
        },
        "num_endpoints": plan.members,
        "num_nodes": 1 if plan.ray_address is None else None,
        "ray_address": plan.ray_address,
        "fragment": plan.fragment,
        "repetitions": plan.repetitions,
        "watch_s": _WATCH_S,
    }
