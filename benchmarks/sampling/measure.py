"""How fast a runner samples through an endpoint, against RLlib's own and against no runner at all.

Ours are two sessions with one endpoint on the same host, each with half of the lanes; each way of
inference is a side of its own, and so are sessions that share an env worker's process. Every
measurement has fresh processes. The speed of a shared machine changes by half from one second to
the next: so all sides run at once, and sample in short turns.
"""

import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import product
from types import MappingProxyType

from benchmarks.findings import Finding, Goal
from benchmarks.machine import work_of
from benchmarks.processes import Process, Reading, Server, busy
from benchmarks.record import Note, Record, by_turns, ratios
from benchmarks.sampling.plan import TASKS, Rival, SamplingPlan, Task
from benchmarks.stepping.specs import ServerSpec
from benchmarks.stepping.targets import OUR_SERVER, UNIT

OURS = "rlmesh-ray"
NAMES = {Rival.RLLIB: "RLlib", Rival.BARE: "no policy", Rival.TORCHRL: "TorchRL"}
GOALS: Mapping[tuple[Task, str, int, Rival], Goal] = MappingProxyType(
    {
        (Task.CARTPOLE_64, "auto", 1, Rival.RLLIB): Goal(f"/ {NAMES[Rival.RLLIB]} >= 4.5", 4.5),
        (Task.CARTPOLE_64, "auto", 1, Rival.BARE): Goal(f"/ {NAMES[Rival.BARE]} >= 0.6", 0.6),
        (Task.HALFCHEETAH_64, "auto", 1, Rival.BARE): Goal(f"/ {NAMES[Rival.BARE]} >= 0.95", 0.95),
        **{
            (task, "auto", 1, Rival.RLLIB): Goal(f"/ {NAMES[Rival.RLLIB]} >= 1", 1.0)
            for task in (Task.CARTPOLE_8, Task.CARTPOLE_256, Task.PENDULUM_64, Task.FRAMES_8)
        },
    }
)
"""By task, inference, sessions per worker and rival; those of what users get without options.
The aims are 6 and 0.8."""

_RUN = (sys.executable, "-m", "benchmarks.sampling.run")
_TURN_S = 0.25


@dataclass(frozen=True, slots=True)
class UsedInference:
    """How the module of one of our runners was run in the end."""

    task: Task
    inference: str
    """What was asked for."""
    repetition: int
    torch_reason: str | None
    """Why it ran in torch; None: it ran compiled."""


def measure_sampling(
    plan: SamplingPlan, note: Note, note_used: Callable[[UsedInference], None]
) -> Iterator[list[Finding]]:
    """Measure all of ``plan``; yield what was found, task by task.

    Args:
        plan: What to measure.
        note: Gets every single measurement when it is made.
        note_used: Gets the inference that was used in each of our measurements.

    Raises:
        EndpointError: A process failed.
    """
    for task in plan.tasks:
        record = Record(task, note)
        for repetition in range(plan.repetitions):
            samplers = _measured(plan, task)
            for name, sampler in samplers.items():
                reading = sampler.reading()
                record.add(task, name, repetition, reading.answers_per_s, UNIT, reading)
            for inference, shared in _ours(plan):
                reason = samplers[our_side(inference, shared)].torch_reason
                note_used(UsedInference(task, inference, repetition, reason))
        yield findings(record, plan, task)


def our_side(inference: str, sessions_per_worker: int = 1) -> str:
    """Return the name of our side with a way of inference and of hosting."""
    return f"{OURS}, {_case(inference, sessions_per_worker)}"


def _case(inference: str, sessions_per_worker: int) -> str:
    return inference if sessions_per_worker == 1 else f"{inference} in a shared worker"


def _ours(plan: SamplingPlan) -> Iterator[tuple[str, int]]:
    """Return the inference and the sessions per worker of each of our sides."""
    return product(plan.inferences, plan.sessions_per_worker)


def findings(record: Record, plan: SamplingPlan, task: Task) -> list[Finding]:
    """Return a line for each of our sides and rival: each has a goal of its own."""
    found = record.sides(task)
    lines = []
    for inference, shared in _ours(plan):
        for rival in plan.rivals_of(task):
            name = NAMES[rival]
            sides = {OURS: found[our_side(inference, shared)], name: found[name]}
            by_rival = ratios(sides)
            case = f"{_case(inference, shared)}, against {name}"
            goal, judged = GOALS.get((task, inference, shared, rival)), by_rival[f"/ {name}"]
            lines.append(Finding(task, case, UNIT, sides, by_rival, goal, judged))
    return lines


@dataclass(slots=True)
class _Sampler:
    """A side's process, and what it has done in its turns."""

    process: Process
    server_pids: Collection[int]
    env_steps: int = 0
    seconds: float = 0.0
    torch_reason: str | None = None
    """Of the last turn of one of ours; see ``UsedInference``."""
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
        self.torch_reason = message["torch_reason"]
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


def _measured(plan: SamplingPlan, task: Task) -> dict[str, _Sampler]:
    """Measure all sides of a task once; return them by name, ours first."""
    samplers: dict[str, _Sampler] = {}
    with ExitStack() as stack:
        for inference, shared in _ours(plan):
            server = stack.enter_context(task_server(task, shared))
            line = task_line(task, "endpoint", server.address, inference)
            name = our_side(inference, shared)
            samplers[name] = _Sampler(_started(stack, name, line), [server.pid])
        for rival in plan.rivals_of(task):
            name = NAMES[rival]
            samplers[name] = _Sampler(_started(stack, name, task_line(task, rival)), [])
        _alternate(list(samplers.values()), plan.warm_up_s)
        for sampler in samplers.values():
            sampler.forget()
        _alternate(list(samplers.values()), plan.seconds)
    return samplers


def _started(stack: ExitStack, name: str, line: str) -> Process:
    process = stack.enter_context(Process(f"the sampler of {name}", _RUN))
    process.send(line)
    process.receive()
    return process


def _alternate(samplers: list[_Sampler], seconds: float) -> None:
    """Have all of them sample by turns, until each has done so for some seconds."""
    took_s = dict.fromkeys(range(len(samplers)), 0.0)
    turn = 0
    while min(took_s.values()) < seconds:
        for number in by_turns(list(took_s), turn):
            took_s[number] += samplers[number].take_turn()
        turn += 1


def task_server(task: Task, sessions_per_worker: int = 1) -> Server:
    """Start the endpoint of a task: each session has half of the runner's lanes."""
    spec = TASKS[task]
    server_spec = ServerSpec(
        spec.env_id,
        spec.num_envs // 2,
        spec.env_kwargs,
        sessions_per_worker=sessions_per_worker,
    )
    return Server("the server", [*OUR_SERVER, server_spec.to_line()])


def task_line(
    task: Task, kind: str, address: str = "", inference: str = "", *, turn_s: float = _TURN_S
) -> str:
    """Return what ``benchmarks.sampling.run`` reads; see its ``RunnerTask``."""
    spec = TASKS[task]
    return json.dumps(
        {
            **asdict(spec),
            "kind": kind,
            "address": address,
            "inference": inference,
            "timesteps": spec.timesteps,
            "turn_s": turn_s,
        }
    )
