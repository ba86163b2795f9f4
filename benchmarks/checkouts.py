"""This checkout against another one: ``python -m benchmarks checkouts PATH``.

The speed of a shared machine changes by a third from one minute to the next. So each case has one
process for each checkout, both stay, and they work by turns of a second or less. What they do is
written here, once, on what both versions have; the servers are those of each checkout's benchmarks.

A side is started as a script (``checkouts.py CASE``) in its checkout, which is the first place that
Python imports from.
"""

import asyncio
import contextlib
import gc
import selectors
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import gymnasium
import numpy as np

from benchmarks.control import say
from benchmarks.findings import Finding, Goal
from benchmarks.machine import work_of
from benchmarks.processes import Process, Reading, Server, busy
from benchmarks.record import Note, Record, by_turns, ratios
from benchmarks.serving.closed_loop import ask_by_turns
from benchmarks.serving.frames import DIALECTS, JOIN
from benchmarks.serving.streams import Stream, Tally
from benchmarks.stepping.specs import CARTPOLE, ServerSpec
from benchmarks.stepping.targets import OUR_SERVER
from rlmesh_ray import RemoteModel, RemoteVectorEnv
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.spaces.gym_conversion import contract_of

HERE, THERE = "this checkout", "the other one"
_GOAL = Goal(f"/ {THERE} >= 0.98", 0.98)
_UNIT = "steps or predictions/s"
_SAMPLED_LANES = 64
_SAMPLED_STEPS = 4_000

Turn = Callable[[float], tuple[int, float]]
"""Works for so many seconds; returns how many steps or predictions that brought, and in how many
seconds."""


def compare(
    other: Path, cases: Sequence[str], rounds: int, seconds: float, note: Note
) -> Iterator[list[Finding]]:
    """Measure cases one by one; yield the finding of each.

    Args:
        other: The root of the other checkout.
        cases: Some of ``CASES``.
        rounds: Turns of each side.
        seconds: Of a turn.
        note: Gets every single measurement when it is made.

    Raises:
        ConfigurationError: ``other`` is not a checkout.
        EndpointError: A process failed.
    """
    if not (other / "rlmesh_ray" / "__init__.py").exists():
        raise ConfigurationError(f"{other} is not a checkout of rlmesh-ray: it has no rlmesh_ray/")
    paths = {HERE: Path(__file__).parents[1], THERE: other.resolve()}
    for case in cases:
        record = Record("checkouts", note)
        with ExitStack() as stack:
            sides = {
                name: stack.enter_context(Process(f"{case} of {name}", _command(path, case)))
                for name, path in paths.items()
            }
            for process in sides.values():
                process.receive()
            for name in sides:
                _take_turn(sides[name], seconds)  # the warm-up
            for number in range(rounds):
                for name in by_turns(list(sides), number):
                    reading = _take_turn(sides[name], seconds)
                    record.add(case, name, number, reading.answers_per_s, _UNIT, reading)
        found = record.sides(case)
        sides_found = {name: found[name] for name in paths}
        compared = ratios(sides_found)
        judged = compared[f"/ {THERE}"]
        yield [Finding("checkouts", case, _UNIT, sides_found, compared, _GOAL, judged)]


def _command(checkout: Path, case: str) -> list[str]:
    # -P: else the script's own folder came first, and with it benchmarks/statistics.py.
    script = [sys.executable, "-P", __file__, case]
    return ["env", "-C", str(checkout), f"PYTHONPATH={checkout}", *script]


def _take_turn(side: Process, seconds: float) -> Reading:
    before = work_of([[side.pid]])
    side.send(str(seconds))
    reply = side.receive(seconds)
    after = work_of([[side.pid]])
    (own,), others = ([None], None) if not (before and after) else busy(before, after)
    return Reading(
        answers_per_s=reply["answers"] / reply["seconds"],
        latencies_us=(),
        lags_us=(),
        server_cores=own,
        client_cores=(),
        other_cores=others,
    )


# --- what a side does ------------------------------------------------------------------


def _timed(step: Callable[[], int]) -> Turn:
    def turn(seconds: float) -> tuple[int, float]:
        count, now_s = 0, time.perf_counter()
        began_s, end_s = now_s, now_s + seconds
        while now_s < end_s:
            count += step()
            now_s = time.perf_counter()
        return count, now_s - began_s

    return turn


def _steps(stack: ExitStack, *, num_envs: int, transport: str) -> Turn:
    spec = ServerSpec(CARTPOLE, num_envs)
    server = stack.enter_context(Server("the endpoint", [*OUR_SERVER, spec.to_line()]))
    remote = stack.enter_context(
        contextlib.closing(RemoteVectorEnv(server.address, transport=transport))
    )
    remote.reset(seed=0)
    remote.action_space.seed(0)
    actions = remote.action_space.sample()

    def step() -> int:
        remote.step(actions)
        return num_envs

    return _timed(step)


def _blocking_predictions(stack: ExitStack, *, rows: int) -> Turn:
    model = stack.enter_context(contextlib.closing(RemoteModel(_model_server(stack).address)))
    model.configure_route(replace(contract_of(gymnasium.make(CARTPOLE)), num_envs=rows))
    observations = np.zeros((rows, 4), np.float32)

    def predict() -> int:
        model.predict(observations)
        return 1

    return _timed(predict)


def _predictions(stack: ExitStack, *, routes: int, is_one_stream: bool) -> Turn:
    dialect = DIALECTS["ours"]
    names = tuple(f"route-{number}" for number in range(routes))
    shares = [names] if is_one_stream else [(name,) for name in names]
    tally = Tally()

    async def open_streams(address: str) -> list[asyncio.Task[None]]:
        channel = grpc.aio.insecure_channel(address)
        streams = [Stream(channel.stream_stream(JOIN)(), dialect, tuple(share)) for share in shares]
        for stream in streams:
            for route in stream.routes:
                await stream.write(dialect.opening(route, 1))
                stream.check_opened(await stream.read())
        return [asyncio.ensure_future(ask_by_turns(each, 1, tally)) for each in streams]

    async def work(seconds: float) -> tuple[int, float]:
        tally.begin()
        began_s = time.perf_counter()
        await asyncio.wait(asking, timeout=seconds)
        for failed in asking:
            if failed.done():
                failed.result()
        return len(tally.latencies_us), time.perf_counter() - began_s

    # select() wakes up within microseconds; epoll, the default, rounds to milliseconds.
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    asking = loop.run_until_complete(open_streams(_model_server(stack).address))
    return lambda seconds: loop.run_until_complete(work(seconds))


def _model_server(stack: ExitStack) -> Server:
    command = [sys.executable, "-m", "benchmarks.serving.model_server"]
    return stack.enter_context(Server("the model server", command))


def _samples(stack: ExitStack, *, inference: str, sessions_per_worker: int) -> Turn:
    import ray  # and torch: only where a case samples

    from benchmarks.sampling.run import RunnerTask, sample_for, sampling_runner, start_ray

    spec = ServerSpec(CARTPOLE, _SAMPLED_LANES // 2, sessions_per_worker=sessions_per_worker)
    server = stack.enter_context(Server("the endpoint", [*OUR_SERVER, spec.to_line()]))
    start_ray()
    stack.callback(ray.shutdown)
    task = RunnerTask(
        env_id=CARTPOLE,
        num_envs=_SAMPLED_LANES,
        algorithm="PPO",
        env_kwargs={},
        kind="endpoint",
        address=server.address,
        inference=inference,
        timesteps=_SAMPLED_STEPS,
        turn_s=0.0,
    )
    runner: Any = sampling_runner(task)
    stack.callback(runner.stop)
    gc.collect()
    gc.freeze()  # as on a remote runner
    # In one call there are more batches than inference="auto" compares.
    sample_for(runner, 0.0, _SAMPLED_STEPS)
    return lambda seconds: sample_for(runner, seconds, _SAMPLED_STEPS)


CASES: Mapping[str, Callable[[ExitStack], Turn]] = {
    **{
        f"step-{num_envs}-{transport}": partial(_steps, num_envs=num_envs, transport=transport)
        for num_envs in (1, 64)
        for transport in ("grpc", "tcp", "shared_memory")
    },
    "predict-blocking": partial(_blocking_predictions, rows=1),
    "predict-blocking-32-rows": partial(_blocking_predictions, rows=32),
    "predict-1": partial(_predictions, routes=1, is_one_stream=False),
    "predict-8": partial(_predictions, routes=8, is_one_stream=False),
    "predict-32": partial(_predictions, routes=32, is_one_stream=False),
    "predict-8-one-stream": partial(_predictions, routes=8, is_one_stream=True),
    **{
        f"sample-{inference}{suffix}": partial(
            _samples, inference=inference, sessions_per_worker=sessions
        )
        for inference in ("auto", "torch")
        for sessions, suffix in ((1, ""), (2, "-shared-worker"))
    },
}
"""By name: what a side does."""


def main() -> None:
    """Work for as many seconds as each line of standard input says."""
    with ExitStack() as stack:
        turn = CASES[sys.argv[1]](stack)
        say(ready=True)
        for line in sys.stdin:
            answers, took_s = turn(float(line))
            say(answers=answers, seconds=took_s)


if __name__ == "__main__":
    main()
