"""``rlmesh-ray bench``: how fast an environment is, by itself and through an endpoint.

Measures four things by turns: the environment's own vector in this process, a ``RemoteVectorEnv``
over each transport, and an ``RLMeshEnvRunner``, each at one endpoint in a process of its own.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

import rlmesh_ray
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.local_ray import connected_ray, require_rllib
from rlmesh_ray.cli.options.common import (
    ENVIRONMENT,
    EnvArgument,
    MadeEnvFlags,
    flag,
    search_current_folder,
)
from rlmesh_ray.errors import ConfigurationError, EnvStartError, RlmeshError
from rlmesh_ray.options import SHARED_MEMORY, TCP, require_seconds
from rlmesh_ray.protocol.address import looks_like_address

BY_ITSELF, RUNNER = "by itself", "RLMeshEnvRunner"
_TRANSPORTS = {"shared memory": SHARED_MEMORY, "TCP": TCP, "gRPC messages": "grpc"}
_NUM_BATCHES = 64
"""Number of action batches, drawn before the measurement."""
_SEED = 1
_MEASUREMENT = "Measurement"
_QUIET_LOAD = 0.35
"""Load average per core above which the machine counts as busy."""


@dataclass(frozen=True)
class BenchFlags(MadeEnvFlags):
    """How much is measured."""

    num_envs: int = flag(ENVIRONMENT, "Lanes of the vector.", 32, min=1)
    seconds: float = flag(
        _MEASUREMENT, "Length of each measurement.", 1.0, check=require_seconds, metavar="X"
    )
    repetitions: int = flag(_MEASUREMENT, "Number of measurements of each row.", 3, min=1)


Step = Callable[[], int]
"""Runs some vector steps; returns the number of env steps over all lanes."""


@dataclass
class Rate:
    """The measurements of one row."""

    name: str
    step: Step
    rates: list[float] = field(default_factory=list)
    """Env steps per second."""
    cores: list[float] = field(default_factory=list)
    """Processor seconds per second; empty where the system has no such counter."""

    @property
    def steps_per_s(self) -> float:
        return statistics.median(self.rates)

    @property
    def num_cores(self) -> float | None:
        """Median of ``cores``; None: not known."""
        return statistics.median(self.cores) if self.cores else None


def bench(console: Console, env: EnvArgument, flags: BenchFlags) -> None:
    """Measure how fast an environment is, by itself and through an endpoint, and what limits it."""
    if looks_like_address(env):
        raise ConfigurationError(
            f"{env} is an address; bench starts its own endpoint: give a Gymnasium id or "
            "module:factory"
        )
    kwargs = flags.kwargs()
    search_current_folder(env)
    with contextlib.ExitStack() as stack:
        with console.waiting("starting the environment"):
            own = _own_vector(env, flags.num_envs, kwargs)
        stack.callback(own.close)
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        if load > _QUIET_LOAD * (os.cpu_count() or 1):
            console.say(
                f"Other programs keep this machine busy (load average {load:.1f}); the rates will "
                "be too low, most of all those of endpoints.",
                style="yellow",
            )
        rates = [Rate(BY_ITSELF, _stepping(own))]
        with console.waiting("starting the endpoint"):
            address, pid = stack.enter_context(_endpoint(env, own.num_envs, kwargs))
        for name, transport in _TRANSPORTS.items():
            try:
                with console.waiting(f"connecting: {name}"):
                    remote = _remote(address, transport)
            except RlmeshError as error:
                console.say(f"no {name}: {error}", style="yellow")
                continue
            stack.callback(remote.close)
            rates.append(Rate(name, _stepping(remote)))
        try:
            require_rllib("the runner's row")
        except ConfigurationError as error:
            console.say(str(error), style="yellow")
        else:
            with console.waiting("loading Ray and RLlib"):
                from rlmesh_ray.rllib.local_sampling import sampling

            stack.enter_context(connected_ray(console, 1, address="local"))
            with console.waiting("starting the runner"):
                sample = stack.enter_context(sampling(address, own.num_envs, seed=_SEED))
            rates.append(Rate(RUNNER, sample))
        total_s = len(rates) * flags.seconds * (flags.repetitions + 0.5)
        with console.waiting(f"measuring, {total_s:.0f} s in all"):
            _measure(rates, flags.seconds, flags.repetitions, pid)
    _show(console, env, own.num_envs, rates)


def _own_vector(env: str, num_envs: int, kwargs: Mapping[str, object] | None) -> Any:
    from rlmesh_ray.envs.env_source import build, explain_start_error, make_source

    source = make_source(env, num_envs, kwargs)
    try:
        return build(source)
    except RlmeshError:
        raise
    except Exception as error:
        raise EnvStartError(f"cannot create {env}: {explain_start_error(error)}") from error


@contextlib.contextmanager
def _endpoint(
    env: str, num_envs: int, kwargs: Mapping[str, object] | None
) -> Iterator[tuple[str, int]]:
    """Serve ``env`` in a process of its own; yield the endpoint's address and process id."""
    command = [sys.executable, "-m", "rlmesh_ray", "serve-env", env, "--json"]
    command += ["--num-envs", str(num_envs)]
    if kwargs:
        command += ["--env-kwargs", json.dumps(kwargs)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None, "it is a pipe"
            event = json.loads(process.stdout.readline() or "{}")
            if event.get("event") != "serving":
                raise EnvStartError(
                    f"serve-env {env} does not start: {event.get('message', 'no reason given')}"
                )
            yield event["address"], process.pid
        finally:
            process.terminate()


def _remote(address: str, transport: str) -> Any:

    remote = rlmesh_ray.RemoteVectorEnv(address, transport=transport)
    try:
        remote.reset(seed=_SEED)
        remote.step(remote.action_space.sample())
    except BaseException:
        remote.close()
        raise
    return remote


def _stepping(vector: Any) -> Step:
    vector.reset(seed=_SEED)
    vector.action_space.seed(_SEED)
    actions = [vector.action_space.sample() for _ in range(_NUM_BATCHES)]
    position = 0

    def step() -> int:
        nonlocal position
        vector.step(actions[position])
        position = (position + 1) % _NUM_BATCHES
        return int(vector.num_envs)

    return step


def _measure(rates: Sequence[Rate], seconds: float, repetitions: int, endpoint_pid: int) -> None:
    for rate in rates:  # warm-up: waits adapt how long they spin
        _steps_within(rate.step, seconds / 2)
    for _ in range(repetitions):
        for rate in rates:
            before_s = _processor_s(endpoint_pid)
            num_steps, took_s = _steps_within(rate.step, seconds)
            after_s = _processor_s(endpoint_pid)
            rate.rates.append(num_steps / took_s)
            if before_s is not None and after_s is not None:
                rate.cores.append((after_s - before_s) / took_s)


def _steps_within(step: Step, seconds: float) -> tuple[int, float]:
    num_steps, began_s = 0, time.perf_counter()
    while (took_s := time.perf_counter() - began_s) < seconds or not num_steps:
        num_steps += step()
    return num_steps, took_s


def _processor_s(endpoint_pid: int) -> float | None:
    if not Path("/proc/self/stat").exists():
        return None
    ticks, parents = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # a process that has just ended
            # The second field is a name in brackets, and may hold anything.
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    family = {endpoint_pid}
    while new := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= new
    total = sum(ticks.get(pid, 0) for pid in family)
    return time.process_time() + total / os.sysconf("SC_CLK_TCK")


def _show(console: Console, env: str, num_envs: int, rates: Sequence[Rate]) -> None:
    own = rates[0].steps_per_s
    table = Table(title=f"{env}, {num_envs} lane{'s' * (num_envs > 1)}", title_justify="left")
    table.add_column("")
    for name in ("env steps/s", "of by itself", "cores", "processor time a step"):
        table.add_column(name, justify="right")
    for rate in rates:
        cores = rate.num_cores
        cost_us = None if cores is None else 1e6 * cores / rate.steps_per_s
        table.add_row(
            rate.name,
            f"{rate.steps_per_s:,.0f}",
            f"{rate.steps_per_s / own:.2f}",
            "?" if cores is None else f"{cores:.2f}",
            "?" if cost_us is None else f"{cost_us:.3g} us",
        )
        console.event(
            "rate",
            name=rate.name,
            steps_per_s=rate.steps_per_s,
            steps_per_s_all=rate.rates,
            cores=cores,
        )
    console.show(table)
    limit = what_limits({rate.name: rate.steps_per_s for rate in rates}, num_envs)
    console.say(limit)
    console.event("result", env=env, num_envs=num_envs, limit=limit)


def what_limits(steps_per_s: Mapping[str, float], num_envs: int) -> str:
    """Return a sentence that names what limits the rate.

    Args:
        steps_per_s: Env steps per second of each row: ``BY_ITSELF`` and at least one more.
        num_envs: Number of lanes.
    """
    own = steps_per_s[BY_ITSELF]
    remote = {name: rate for name, rate in steps_per_s.items() if name not in {BY_ITSELF, RUNNER}}
    name, best = max(remote.items(), key=lambda item: item[1])
    step_us = 1e6 * num_envs / own
    extra_us = max(1e6 * num_envs / best - step_us, 0.0)
    if extra_us <= 0.25 * step_us:
        sentence = (
            f"The environment limits: a vector step takes it {_duration(step_us)}, and {name} adds "
            f"{_duration(extra_us)}. More endpoints make more steps."
        )
    else:
        sentence = (
            f"The transport limits: {name} adds {_duration(extra_us)} to a vector "
            f"step of {_duration(step_us)}. More lanes an endpoint (--num-envs) share that."
        )
    runner = steps_per_s.get(RUNNER)
    if runner is not None and runner < 0.75 * best:
        runner_us = 1e6 * num_envs * (1 / runner - 1 / best)
        sentence += (
            f" Under a runner the policy and the episodes take {_duration(runner_us)} more: "
            "train with more runners (num_env_runners)."
        )
    return sentence


def _duration(microseconds: float) -> str:
    if microseconds >= 1000:
        return f"{microseconds / 1000:.3g} ms"
    return f"{microseconds:.2g} us" if microseconds < 10 else f"{microseconds:.0f} us"
