"""Cost of the control plane with many endpoints: ``python -m benchmarks.scaling.control_run``.

It reads a line of JSON; writes a line about a fleet, one about the registry, and one about many
endpoints under one runner. Processes are read from ``/proc``, so all of them run on this machine.
"""

import json
import os
import pkgutil
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.rllib.algorithms.ppo import PPOConfig

from benchmarks.measured_process import only_for_the_parent
from benchmarks.scaling.nodes import ACTOR_CPUS, HostedEndpoints, ray_nodes
from benchmarks.scaling.rate_run import start_runners
from rlmesh_ray.actors.env_fleet import EnvFleet
from rlmesh_ray.actors.registry.registry_actor import shared_registry
from rlmesh_ray.auth.ray_credentials import RayTls
from rlmesh_ray.rllib.config.configure import configure
from rlmesh_ray.rllib.config.rollout_plan import PLAN_KEY
from rlmesh_ray.rllib.runner.env_runner import RLMeshEnvRunner

_HOSTS = 2
"""Actors that share the endpoints."""
_LOOKUPS = 2_000
_AT_ONCE = 50
_BYTES_PER_MB = 1e6
_PID: Callable[[object], int] = lambda _actor: os.getpid()  # noqa: E731
"""A lambda is pickled with its code: who started the registry may not have this module."""


@dataclass(frozen=True, slots=True)
class _Task:
    env: str
    """``module:factory``."""
    env_kwargs: Mapping[str, object]
    num_endpoints: int
    fleet: int
    """Endpoints that are started as an ``EnvFleet``."""
    records: int
    """In the registry, for its own cost."""
    fragment: int
    """Vector steps of each endpoint in a call of ``sample``."""
    seconds: float
    """Of idling, and of sampling."""


class RolloutRunner(RLMeshEnvRunner):
    """Samples for a while on request, and reports on its process."""

    def sample_for(self, seconds: float, fragment: int) -> dict[str, float]:
        """Sample; return env steps, seconds and processor time."""
        num_steps, began_s, cpu_s = 0, time.perf_counter(), time.process_time()
        while (took_s := time.perf_counter() - began_s) < seconds:
            num_steps += sum(map(len, self.sample(num_timesteps=fragment * self.num_envs)))
        return {"steps": num_steps, "seconds": took_s, "cpu_s": time.process_time() - cpu_s}

    def process(self) -> dict[str, int]:
        """Return id and number of threads of this process."""
        return {"pid": os.getpid(), "threads": threading.active_count()}


def main() -> None:
    """Do the work that standard input describes."""
    task = _Task(**json.loads(sys.stdin.readline()))
    parent = only_for_the_parent()
    factory = pkgutil.resolve_name(task.env)

    def say(**fields: object) -> None:
        parent.write(json.dumps(fields) + "\n")
        parent.flush()

    with ray_nodes(1, None) as cluster:
        assert cluster is not None, "one node was started here"
        say(load=os.getloadavg()[0])
        say(fleet=_fleet(factory, task))
        say(registry=registry_cost(task.records))
        say(rollout=_rollout(factory, task, cluster))
    say(ended=True)


def _fleet(factory: Callable[..., Any], task: _Task) -> dict[str, float]:
    """Start a fleet; return how long it took, and what an endpoint's actor and worker take."""
    began_s = time.monotonic()
    with EnvFleet(
        factory, num_endpoints=task.fleet, env_kwargs=task.env_kwargs, num_cpus=ACTOR_CPUS
    ) as fleet:
        start_s = time.monotonic() - began_s
        facts = ray.get([actor.describe.remote() for actor in fleet.actors])
        pids = [each["pid"] for each in facts]
        own = sum(map(_memory_mb, pids)) / len(pids)
        workers = [worker for pid in pids for worker in _children(pid)]
        return {
            "endpoints": len(pids),
            "start_s": start_s,
            "actor_mb": own,
            "worker_mb": sum(_of_each(_memory_mb, workers).values()) / len(pids),
        }


def registry_cost(num_records: int, *, num_lookups: int = _LOOKUPS) -> dict[str, float]:
    """Give the registry many records, and take them away again.

    Args:
        num_records: How many.
        num_lookups: How many are looked up meanwhile.

    Returns:
        What they take, and what calls take.
    """
    registry = shared_registry()
    pid = ray.get(registry.__ray_call__.remote(_PID))
    before_mb, before_cpu_s = _memory_mb(pid), _cpu_s(pid)
    prefix = secrets.token_hex(4)
    ids = [f"{prefix}-{index}" for index in range(num_records)]
    began_s = time.monotonic()
    _call_all(lambda each: registry.announce.remote(each, "10.0.0.1:12345"), ids)
    announce_s = time.monotonic() - began_s
    announce_cpu_s = _cpu_s(pid) - before_cpu_s
    records_mb = _memory_mb(pid) - before_mb
    before_cpu_s, began_s = _cpu_s(pid), time.monotonic()
    _call_all(registry.lookup.remote, [ids[index % num_records] for index in range(num_lookups)])
    lookup_s = time.monotonic() - began_s
    lookup_cpu_s = _cpu_s(pid) - before_cpu_s
    began_s = time.monotonic()
    ray.get(registry.lookup.remote(ids[0]))
    alone_s = time.monotonic() - began_s
    _call_all(registry.withdraw.remote, ids)
    return {
        "records": num_records,
        "records_mb": records_mb,
        "memory_mb": before_mb,
        "announces_per_s": num_records / announce_s,
        "announce_cpu_us": 1e6 * announce_cpu_s / num_records,
        "lookups_per_s": num_lookups / lookup_s,
        "lookup_cpu_us": 1e6 * lookup_cpu_s / num_lookups,
        "lookup_alone_ms": 1e3 * alone_s,
    }


def _call_all(call: Callable[[str], Any], ids: Sequence[str]) -> None:
    """Call for each id, a few at a time: what waits in a queue takes memory of its own."""
    for first in range(0, len(ids), _AT_ONCE):
        ray.get([call(each) for each in ids[first : first + _AT_ONCE]])


def _rollout(factory: Callable[..., Any], task: _Task, cluster: Cluster) -> dict[str, Any]:
    """Sample from many endpoints; return how long it took, and what everybody worked."""
    began_s = time.monotonic()
    with HostedEndpoints(
        factory,
        task.env_kwargs,
        num_hosts=_HOSTS,
        each=task.num_endpoints // _HOSTS,
        transport="shared_memory",
    ) as hosted:
        served_s = time.monotonic()
        config = PPOConfig().env_runners(num_env_runners=1)
        config = configure(config, hosted.addresses, token=hosted.token, tls=RayTls())
        # As a fleet's: the runner looks each of them up.
        plan = config.env_config[PLAN_KEY]
        config.env_config[PLAN_KEY] = replace(plan, resolver=hosted.resolver)
        configured_s = time.monotonic()
        (runner,) = start_runners(config, 1, RolloutRunner)
        pid = ray.get(runner.process.remote())["pid"]
        opened_s = time.monotonic()
        ray.get(runner.sample_for.remote(0.1, 1))
        reset_s = time.monotonic()
        registry = ray.get(hosted.registry.__ray_call__.remote(_PID))
        hosts = ray.get([actor.pid.remote() for actor in hosted.actors])
        groups = {
            "runner": [pid],
            "registry": [registry],
            "endpoints": hosts,
            "workers": [worker for host in hosts for worker in _children(host)],
            "driver": [os.getpid()],
            "Ray's control store": _own_processes(cluster, "gcs_server"),
            "Ray's node": _own_processes(cluster, "raylet"),
        }
        with cores_of(groups) as idle:
            time.sleep(task.seconds)
        with cores_of(groups) as busy:
            sampled = ray.get(runner.sample_for.remote(task.seconds, task.fragment))
        found = {
            "endpoints": len(hosted.addresses),
            "lanes": plan.lanes_per_runner,
            "serve_s": served_s - began_s,
            "configure_s": configured_s - served_s,
            "open_s": opened_s - configured_s,
            "first_steps_s": reset_s - opened_s,
            "threads": ray.get(runner.process.remote())["threads"],
            "memory_mb": {
                name: sum(_of_each(_memory_mb, pids).values()) for name, pids in groups.items()
            },
            "idle_cores": idle,
            "busy_cores": busy,
            "steps_per_s": sampled["steps"] / sampled["seconds"],
        }
        ray.get(runner.stop.remote())
    return found


@contextmanager
def cores_of(groups: Mapping[str, Iterable[int]]) -> Iterator[dict[str, float]]:
    """Yield what becomes the cores that groups of processes kept busy."""
    cores: dict[str, float] = {}
    before = {name: _of_each(_cpu_s, pids) for name, pids in groups.items()}
    began_s = time.monotonic()
    yield cores
    took_s = time.monotonic() - began_s
    for name, earlier in before.items():
        later = _of_each(_cpu_s, earlier)
        cores[name] = sum(later[pid] - earlier[pid] for pid in later) / took_s


def _own_processes(cluster: Cluster, kind: str) -> list[int]:
    return [each.process.pid for each in cluster.head_node.all_processes.get(kind, [])]


def _of_each(measure: Callable[[int], float], pids: Iterable[int]) -> dict[int, float]:
    """Measure those that are still there: endpoints may replace a worker at any time."""
    found = {}
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            found[pid] = measure(pid)
    return found


def _memory_mb(pid: int) -> float:
    """Return the private memory of a process, and its share of what it shares with other ones."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024 / _BYTES_PER_MB
    raise OSError(f"/proc/{pid}/smaps_rollup has no Pss")


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    described = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in described for child in path.read_text().split()]


if __name__ == "__main__":
    main()
