"""Steps of an endpoint that records beside one that does not; the writer's processor time."""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from gymnasium.vector import SyncVectorEnv

from benchmarks.findings import Finding, Goal
from benchmarks.processes import Reading
from benchmarks.record import Note, Record, by_turns, ratios
from benchmarks.recording.plan import RecordingPlan, RecordingRow
from benchmarks.stepping.specs import CARTPOLE, ClientSpec, Mode, ServerSpec
from benchmarks.stepping.targets import Target
from benchmarks.watching.cart_pole import DrawnCartPole
from rlmesh_ray import EnvServer, RemoteVectorEnv
from rlmesh_ray.recording import EpisodeSummary, load
from rlmesh_ray.recording.recorder import StepCollector, Stream
from rlmesh_ray.recording.store import RecordingInfo, Store
from rlmesh_ray.recording.writer_process import EpisodeWriter
from rlmesh_ray.spaces.spec import BoxSpec, DiscreteSpec

RECORDED, PLAIN = "with record", "without"
_STEPS_GOAL = Goal(f"/ {PLAIN} >= 0.9", 0.9)
_VIDEO_GOAL = Goal("<= 0.25 cores a lane-second", 0.25, is_ceiling=True)
_INDEX_GOAL = Goal("<= 2 s", 2.0, is_ceiling=True)
_RENDER_GOAL = Goal("/ SyncVectorEnv <= 2", 2.0, is_ceiling=True)
_FILMED, _DRAWN = "with videos", "drawing alone"
_DRAWN_LANES, _FILMED_LANES = 10, 4
_LANES, _FPS, _VIDEO_S, _EPISODES = 8, 30, 10, 10_000
_NOTHING = Reading(0.0, (1,), (), None, (), None)
_CAMERA = RecordingInfo(
    "Frames-v0", BoxSpec((84, 84, 4), "uint8", b"\0", b"\xff"), DiscreteSpec(6), float(_FPS)
)


def measure_recording(plan: RecordingPlan, note: Note) -> Iterator[list[Finding]]:
    """Measure all of ``plan``; yield what was found, one row after the other.

    Args:
        plan: What to measure.
        note: Gets every single measurement when it is made.

    Raises:
        EndpointError: A process failed; there is no number.
    """
    rows = {
        RecordingRow.STEPS: lambda: _steps(plan, note),
        RecordingRow.VIDEO: lambda: _timed(
            RecordingRow.VIDEO,
            "8 lanes of 84x84x4 to Parquet and MP4",
            "cores a lane-second",
            _VIDEO_GOAL,
            lambda: written_s() / (_LANES * _VIDEO_S),
            (plan, note),
        ),
        RecordingRow.INDEX: lambda: _timed(
            RecordingRow.INDEX,
            f"load() with {_EPISODES:,} episodes",
            "s",
            _INDEX_GOAL,
            opened_s,
            (plan, note),
        ),
    }
    rows[RecordingRow.RENDER] = lambda: _render(plan, note)
    rows[RecordingRow.EVALUATE] = lambda: _evaluate(plan, note)
    for row, measured in rows.items():
        if row in plan.rows:
            yield [measured()]


def _steps(plan: RecordingPlan, note: Note) -> Finding:
    record = Record(RecordingRow.STEPS, note)
    case = "64 lanes of CartPole, shared memory"
    client = ClientSpec(Mode.VECTOR, plan.warm_up_s, plan.seconds, transport="shared_memory")
    targets = [
        Target(name, client, (ServerSpec(CARTPOLE, 64, records=name == RECORDED),))
        for name in (RECORDED, PLAIN)
    ]
    for repetition in range(plan.repetitions):
        for target in by_turns(targets, repetition):
            reading = target.measure()
            rate = reading.answers_per_s
            record.add(case, target.name, repetition, rate, "steps/s", reading)
    return _compared(record, case, "steps/s", [RECORDED, PLAIN], _STEPS_GOAL)


def _render(plan: RecordingPlan, note: Note) -> Finding:
    case = f"{_DRAWN_LANES} lanes of CartPole"
    record = Record(RecordingRow.RENDER, note)
    with EnvServer(DrawnCartPole, num_envs=_DRAWN_LANES) as server:
        sides = {
            "RemoteVectorEnv": RemoteVectorEnv(server.address),
            "SyncVectorEnv": SyncVectorEnv([DrawnCartPole] * _DRAWN_LANES),
        }
        for env in sides.values():
            env.reset(seed=0)
            env.render()
        for repetition in range(plan.repetitions):
            for name in by_turns(list(sides), repetition):
                took_s = _mean_s(sides[name].render, plan.seconds, time.perf_counter)
                record.add(case, name, repetition, 1000 * took_s, "ms", _NOTHING)
        for env in sides.values():
            env.close()
    return _compared(record, case, "ms", list(sides), _RENDER_GOAL)


def _mean_s(work: Callable[[], object], seconds: float, clock: Callable[[], float]) -> float:
    """Return how long ``work`` takes by ``clock``, when it is done for some seconds."""
    count, began_s, end_s = 0, clock(), time.monotonic() + seconds
    while not count or time.monotonic() < end_s:
        work()
        count += 1
    return (clock() - began_s) / count


def _evaluate(plan: RecordingPlan, note: Note) -> Finding:
    case, unit = "evaluate --record of 4 episodes of CartPole", "ms of a processor a frame"
    record = Record(RecordingRow.EVALUATE, note)
    env = DrawnCartPole()
    env.reset(seed=0)
    sides: dict[str, Callable[[], float]] = {
        _FILMED: lambda: evaluated_s("render"),
        _DRAWN: lambda: _mean_s(env.render, plan.seconds, time.process_time),
        "without videos": lambda: evaluated_s("none"),
    }
    for repetition in range(plan.repetitions):
        for name in by_turns(list(sides), repetition):
            record.add(case, name, repetition, 1000 * sides[name](), unit, _NOTHING)
    return _compared(record, case, unit, list(sides))


def _compared(
    record: Record, case: str, unit: str, names: list[str], goal: Goal | None = None
) -> Finding:
    found = record.sides(case)
    sides = {name: found[name] for name in names}
    shares = ratios(sides)
    judged = shares[f"/ {names[1]}"] if goal else None
    return Finding(record.workload, case, unit, sides, shares, goal, judged)


def balance() -> Callable[[np.ndarray], np.ndarray]:
    """Return a policy whose episodes of CartPole are long."""
    return lambda states: (states[:, 2] + states[:, 3] > 0).astype(np.int64)


def evaluated_s(video: str) -> float:
    """Return the processor time of ``evaluate --record`` for each frame, over all its processes.

    Args:
        video: Value of ``--record-video``.
    """
    before_s = _children_s()
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "--env": f"{DrawnCartPole.__module__}:DrawnCartPole",
            "--num-envs": str(_FILMED_LANES),
            "--model": f"{balance.__module__}:balance",
            "--episodes": str(_FILMED_LANES),
            "--seed": "1",
            "--record": folder,
            "--record-video": video,
        }
        subprocess.run(
            [sys.executable, "-m", "rlmesh_ray", "evaluate", *sum(options.items(), ())],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        num_frames = sum(episode.length + 1 for episode in load(folder).episodes)
    return (_children_s() - before_s) / num_frames


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _timed(
    row: RecordingRow,
    case: str,
    unit: str,
    goal: Goal,
    measured: Callable[[], float],
    into: tuple[RecordingPlan, Note],
) -> Finding:
    plan, note = into
    record = Record(row, note)
    for repetition in range(plan.repetitions):
        record.add(case, RECORDED, repetition, measured(), unit, _NOTHING)
    sides = record.sides(case)
    return Finding(row, case, unit, sides, {}, goal, sides[RECORDED])


def written_s() -> float:
    """Return the processor time, in this process, of what the writer does with such lanes."""
    pictures = _pictures()
    collector = StepCollector(_CAMERA, _LANES, autoresets=False)
    no, zeros = np.zeros(_LANES, np.bool_), np.zeros(_LANES)
    actions = np.zeros(_LANES, np.int64)
    with tempfile.TemporaryDirectory() as folder:
        writer = EpisodeWriter(folder, 10.0)
        writer.handle("0", Stream(_CAMERA, "", "auto"))
        used_s = 0.0
        collector.add_reset(range(_LANES), [], [pictures[0]], {})
        for step in range(1, _FPS * _VIDEO_S + 1):
            last = no if step < _FPS * _VIDEO_S else ~no
            collector.add_step([pictures[step % len(pictures)], actions, zeros, last, no], {})
            if collector.is_full or last.any():
                block = collector.take()
                assert block is not None, "it has rows"
                began_s = time.process_time()
                writer.handle("0", block)
                used_s += time.process_time() - began_s
        episodes = load(folder).episodes
        assert sum(each.video is not None for each in episodes) == _LANES
    return used_s


def _pictures() -> list[np.ndarray]:
    """Return frames in which squares move over a still, noisy ground, as in an emulator."""
    ground = np.random.default_rng(0).integers(40, 90, (84, 84), np.uint8)
    shown = []
    for at in range(64):
        frame = ground.copy()
        frame[at : at + 12, 20:40], frame[70:76, 83 - at - 16 : 83 - at] = 250, 180
        shown.append(frame)
    stacks = [np.stack([shown[at - back] for back in (3, 2, 1, 0)], axis=-1) for at in range(64)]
    return [np.repeat(stack[np.newaxis], _LANES, axis=0) for stack in stacks]


def opened_s() -> float:
    """Return how long ``load`` takes for a folder of many episodes."""
    with tempfile.TemporaryDirectory() as folder:
        Store(folder).create(_CAMERA)
        lines = (
            EpisodeSummary(
                id=f"{number:06}",
                length=500,
                return_=500.0,
                seed=number,
                lane=number % 64,
                endpoint="127.0.0.1:50051",
                policy_version=None,
                ended_at=1.8e9 + number,
                terminated=True,
                truncated=False,
                video=Path(folder, f"{number:06}.mp4"),
            ).to_json()
            for number in range(1, _EPISODES + 1)
        )
        Path(folder, "index.jsonl").write_text("".join(f"{line}\n" for line in lines))
        began_s = time.perf_counter()
        assert len(load(folder).episodes) == _EPISODES
        return time.perf_counter() - began_s
