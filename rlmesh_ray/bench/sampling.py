"""How fast a runner samples through an endpoint, against RLlib's own and against no runner at all.

CartPole and PPO's default module, 64 lanes: ours are two sessions of 32 with one endpoint on the
same host. Every measurement has fresh processes; the sides take turns in going first.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping

from rlmesh_ray.bench.contenders import OUR_SERVER, UNIT, Contender
from rlmesh_ray.bench.drive import CARTPOLE, Drive, Hosting, Way
from rlmesh_ray.bench.findings import Finding, Goal
from rlmesh_ray.bench.load import Order
from rlmesh_ray.bench.processes import Reading, Server, measure
from rlmesh_ray.bench.record import Note, Record, by_turns, ratios
from rlmesh_ray.bench.sampling_plan import Rival, SamplingPlan

WORKLOAD = "sampling"
OURS = "rlmesh-ray"
NAMES = {Rival.RLLIB: "RLlib", Rival.BARE: "no policy"}
GOALS = {
    Rival.RLLIB: Goal(f"/ {NAMES[Rival.RLLIB]} >= 4", 4.0),
    Rival.BARE: Goal(f"/ {NAMES[Rival.BARE]} >= 0.55", 0.55),
}

_RUN = (sys.executable, "-m", "rlmesh_ray.rllib.sampling_run")
_LANES, _SESSION_LANES = 64, 32
_TIMESTEPS = 4_000
"""Of each call of ``sample``: what PPO asks for at once, by default."""
_CASE = f"{_LANES} lanes"


def measure_sampling(plan: SamplingPlan, note: Note) -> Iterator[list[Finding]]:
    """Measure all of ``plan``; yield what was found.

    Args:
        plan: What to measure.
        note: Gets every single measurement when it is made.

    Raises:
        EndpointError: A process failed.
    """
    sides: Mapping[str, Callable[[], Reading]] = {
        OURS: lambda: _ours(plan),
        **{NAMES[rival]: _RIVALS[rival](plan) for rival in plan.rivals},
    }
    record = Record(WORKLOAD, note)
    for repetition in range(plan.repetitions):
        for side in by_turns(list(sides), repetition):
            reading = sides[side]()
            record.add(_CASE, side, repetition, reading.answers_per_s, UNIT, reading)
    yield findings(record, plan)


def findings(record: Record, plan: SamplingPlan) -> list[Finding]:
    """Return a line for each rival: each has a goal of its own."""
    found = record.sides(_CASE)
    lines = []
    for rival in plan.rivals:
        name = NAMES[rival]
        sides = {OURS: found[OURS], name: found[name]}
        by_rival = ratios(sides)
        case = f"{_CASE}, against {name}"
        goal, judged = GOALS[rival], by_rival[f"/ {name}"]
        lines.append(Finding(WORKLOAD, case, UNIT, sides, by_rival, goal, judged))
    return lines


def _ours(plan: SamplingPlan) -> Reading:
    hosting = Hosting(CARTPOLE, _SESSION_LANES)
    with Server("the server", [*OUR_SERVER, hosting.to_line()]) as server:
        return measure([server.pid], [_order(plan, server.address)])


def _rllib(plan: SamplingPlan) -> Callable[[], Reading]:
    return lambda: measure([], [_order(plan, "")])


def _bare(plan: SamplingPlan) -> Callable[[], Reading]:
    drive = Drive(Way.SYNC, plan.warm_up_s, plan.seconds, num_envs=_LANES)
    return Contender(NAMES[Rival.BARE], drive).measure


_RIVALS = {Rival.RLLIB: _rllib, Rival.BARE: _bare}


def _order(plan: SamplingPlan, address: str) -> Order:
    task = {
        "env_id": CARTPOLE,
        "address": address,
        "num_envs": _LANES,
        "timesteps": _TIMESTEPS,
        "warm_up_s": plan.warm_up_s,
        "seconds": plan.seconds,
    }
    return Order(_RUN, json.dumps(task), plan.warm_up_s, plan.seconds)
