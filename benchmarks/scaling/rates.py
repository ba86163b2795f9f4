"""Env steps a second with one endpoint and with many.

Every rate is measured in fresh processes: Ray's nodes, endpoints and runners of its own. It is
compared with as many times the rate of one endpoint in the same repetition.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.findings import Finding, Goal
from benchmarks.machine import Work, work_of
from benchmarks.processes import Process, Reading
from benchmarks.record import Record, by_turns, ratios
from benchmarks.scaling.listener import OURS, SIMULATOR, START_S, Listener, Placed
from benchmarks.scaling.plan import Part, ScalingPlan, Setup, Transport
from benchmarks.statistics import Spread
from benchmarks.stepping.targets import UNIT

IDEAL, SLEEP = "ideal", "sleep alone"
"""As many times the rate of one endpoint; and what the steps' sleep allows."""
EFFICIENCY = f"/ {IDEAL}"
GOAL = Goal(f"{EFFICIENCY} >= 0.9", 0.9)
GOAL_ENDPOINTS = 16

_RUN = (sys.executable, "-m", "benchmarks.scaling.rate_run")


def measure_rates(plan: ScalingPlan, listener: Listener) -> list[Finding]:
    """Measure all setups of ``plan``, in turns.

    Args:
        plan: What to measure.
        listener: Hears of it meanwhile.

    Raises:
        EndpointError: A process failed.
    """
    record = Record(Part.RATES, listener.note)
    for repetition in range(plan.repetitions):
        for setup in by_turns(plan.setups, repetition):
            reading = _measure(plan, setup, repetition, listener)
            record.add(setup.case, OURS, repetition, reading.answers_per_s, UNIT, reading)
    measured = {setup: record.sides(setup.case)[OURS] for setup in plan.setups}
    return rate_findings(measured, plan.simulation.steps_per_s)


def rate_findings(measured: Mapping[Setup, Spread], steps_per_s: float) -> list[Finding]:
    """Return a line for each setup.

    Args:
        measured: Env steps a second of every setup; of each place also with one endpoint and one
            runner.
        steps_per_s: Of one endpoint, if all it did were to sleep.
    """
    findings = []
    for setup, ours in measured.items():
        base = measured[Setup(1, setup.num_nodes)]
        points = setup.num_endpoints
        sides = {
            OURS: ours,
            IDEAL: Spread(tuple(points * value for value in base.values)),
            SLEEP: Spread((points * steps_per_s,) * len(ours.values)),
        }
        compared = ratios(sides)
        goal = GOAL if points == GOAL_ENDPOINTS else None
        judged = compared[EFFICIENCY] if goal else None
        findings.append(Finding(Part.RATES, setup.case, UNIT, sides, compared, goal, judged))
    return findings


def _measure(plan: ScalingPlan, setup: Setup, repetition: int, listener: Listener) -> Reading:
    with Process(f"the run of {setup.case}", _RUN) as run:
        run.send(json.dumps(_task(plan, setup)))
        found = run.receive(START_S)
        listener.placed(
            Placed(
                case=setup.case,
                repetition=repetition,
                load_average=found["load"],
                num_nodes=found["nodes"],
                endpoints_by_node=tuple(found["endpoints_by_node"]),
                endpoints_s=found["endpoints_s"],
                runners_s=found["runners_s"],
                one_by_one=found["one_by_one"],
            )
        )
        run.send()
        run.receive(plan.warm_up_s)
        before = work_of([[run.pid]])
        results = run.receive(plan.seconds)["runners"]
        after = work_of([[run.pid]])
        run.send()
        run.receive()
    return _reading(results, before, after)


def _task(plan: ScalingPlan, setup: Setup) -> dict[str, Any]:
    sessions = setup.num_endpoints // setup.num_runners
    simulation = plan.simulation
    return {
        "env": SIMULATOR,
        "env_kwargs": {
            "num_envs": simulation.lanes,
            "step_s": simulation.step_s,
            "observation_bytes": simulation.observation_bytes,
        },
        "num_endpoints": setup.num_endpoints,
        "num_runners": setup.num_runners,
        "num_nodes": setup.num_nodes,
        "ray_address": plan.ray_address,
        "over_messages": setup.transport is Transport.MESSAGES,
        "timesteps": sessions * simulation.lanes * plan.fragment,
        "warm_up_s": plan.warm_up_s,
        "seconds": plan.seconds,
    }


def _reading(
    results: Sequence[Mapping[str, float]], before: Work | None, after: Work | None
) -> Reading:
    runners = tuple(each["cpu_s"] / each["seconds"] for each in results)
    servers = others = None
    if before is not None and after is not None:
        took_s = after.now_s - before.now_s
        own = (after.groups_s[0] - before.groups_s[0]) / took_s
        # On a cluster that ran before, nothing but the driver is a child of it.
        servers = max(0.0, own - sum(runners)) if own >= sum(runners) else None
        others = max(0.0, (after.all_s - before.all_s) / took_s - max(own, sum(runners)))
    return Reading(
        answers_per_s=sum(each["steps"] / each["seconds"] for each in results),
        latencies_us=(),
        lags_us=(),
        server_cores=servers,
        client_cores=runners,
        other_cores=others,
    )
