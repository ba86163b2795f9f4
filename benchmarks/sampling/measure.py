"""How fast a runner samples through an endpoint, against RLlib's own and against no runner at all.

CartPole and PPO's default module, 64 lanes: ours are two sessions of 32 with one endpoint on the
same host. Every measurement has fresh processes. The speed of a shared machine changes by
half from one second to the next: so all sides run at once, and sample in short turns.
"""

import json
import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks.findings import Finding, Goal
from benchmarks.machine import work_of
from benchmarks.processes import Process, Reading, Server, busy
from benchmarks.record import Note, Record, by_turns, ratios
from benchmarks.sampling.plan import Rival, SamplingPlan
from benchmarks.stepping.specs import CARTPOLE, ServerSpec
from benchmarks.stepping.targets import OUR_SERVER, UNIT

WORKLOAD = "sampling"
OURS = "rlmesh-ray"
NAMES = {Rival.RLLIB: "RLlib", Rival.BARE: "no policy"}
GOALS = {
    Rival.RLLIB: Goal(f"/ {NAMES[Rival.RLLIB]} >= 4", 4.0),
    Rival.BARE: Goal(f"/ {NAMES[Rival.BARE]} >= 0.55", 0.55),
}

_RUN = (sys.executable, "-m", "benchmarks.sampling.run")
_LANES, _SESSION_LANES = 64, 32
_TIMESTEPS = 4_000
"""Of each call of ``sample``: what PPO asks for at once, by default."""
_TURN_S = 0.25
_CASE = f"{_LANES} lanes"


def measure_sampling(plan: SamplingPlan, note: Note) -> Iterator[list[Finding]]:
    """Measure all of ``plan``; yield what was found.

    Args:
        plan: What to measure.
        note: Gets every single measurement when it is made.

    Raises:
        EndpointError: A process failed.
    """
    record = Record(WORKLOAD, note)
    for repetition in range(plan.repetitions):
        for name, reading in _readings(plan).items():
            record.add(_CASE, name, repetition, reading.answers_per_s, UNIT, reading)
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


@dataclass(slots=True)
class _Sampler:
    """A side's process, and what it has done in its turns."""

    process: Process
    server_pids: Collection[int]
    env_steps: int = 0
    seconds: float = 0.0
    # Busy cores of servers, of itself and of all else, with the seconds of each turn.
    _busy: list[tuple[float, float, float, float]] = field(default_factory=list)

    def take_turn(self) -> float:
        """Sample for a turn; return how many seconds that was."""
        groups = [self.server_pids, [self.process.pid]]
        before = work_of(groups)
        self.process.send()
        message = self.process.receive(_TURN_S)
        after = work_of(groups)
        if before is not None and after is not None:
            (servers, own), others = busy(before, after)
            self._busy.append((after.now_s - before.now_s, servers, own, others))
        self.env_steps += message["env_steps"]
        self.seconds += message["seconds"]
        return float(message["seconds"])

    def forget(self) -> None:
        """Let the measurement begin: what came before was the warm-up."""
        self.env_steps, self.seconds = 0, 0.0
        self._busy.clear()

    def reading(self) -> Reading:
        """Return what all turns together have brought."""
        total_s = sum(turn_s for turn_s, *_ in self._busy)
        servers, own, others = (
            sum(turn[0] * turn[which] for turn in self._busy) / total_s if total_s else None
            for which in (1, 2, 3)
        )
        return Reading(
            answers_per_s=self.env_steps / self.seconds,
            latencies_us=(),
            lags_us=(),
            server_cores=servers,
            client_cores=() if own is None else (own,),
            other_cores=others,
        )


def _readings(plan: SamplingPlan) -> dict[str, Reading]:
    """Measure all sides once; by the name of each, ours first."""
    with ExitStack() as stack:
        server_spec = ServerSpec(CARTPOLE, _SESSION_LANES)
        server = stack.enter_context(Server("the server", [*OUR_SERVER, server_spec.to_line()]))
        tasks = {OURS: ("endpoint", server.address)}
        tasks.update((NAMES[rival], (str(rival), "")) for rival in plan.rivals)
        samplers: dict[str, _Sampler] = {}
        for name, (kind, address) in tasks.items():
            process = stack.enter_context(Process(f"the sampler of {name}", _RUN))
            process.send(_task(kind, address))
            process.receive()
            samplers[name] = _Sampler(process, [server.pid] if address else [])
        _alternate(list(samplers.values()), plan.warm_up_s)
        for sampler in samplers.values():
            sampler.forget()
        _alternate(list(samplers.values()), plan.seconds)
        return {name: sampler.reading() for name, sampler in samplers.items()}


def _alternate(samplers: list[_Sampler], seconds: float) -> None:
    """Have all of them sample by turns, until each has done so for some seconds."""
    took_s = dict.fromkeys(range(len(samplers)), 0.0)
    turn = 0
    while min(took_s.values()) < seconds:
        for number in by_turns(list(took_s), turn):
            took_s[number] += samplers[number].take_turn()
        turn += 1


def _task(kind: str, address: str) -> str:
    return json.dumps(
        {
            "env_id": CARTPOLE,
            "kind": kind,
            "address": address,
            "num_envs": _LANES,
            "timesteps": _TIMESTEPS,
            "turn_s": _TURN_S,
        }
    )
