"""A rate with some endpoints, as a process of its own: ``python -m benchmarks.scaling.rate_run``.

It reads a line of JSON, starts nodes, endpoints and runners, and writes their placement; waits
for a line, writes ``begun`` when the warm-up is over, and then how many env steps each runner
has sampled, in how many seconds; waits for a line, and ends what it has started. There is no
learner, and episodes stay where they are sampled.
"""

import contextlib
import json
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

import ray
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo import PPOConfig

from benchmarks.measured_process import only_for_the_parent
from benchmarks.scaling.nodes import (
    ACTOR_CPUS,
    HostedEndpoints,
    beside_me,
    endpoints_by_node,
    ray_nodes,
)
from rlmesh_ray.actors.env_fleet import EnvFleet
from rlmesh_ray.auth.ray_credentials import RayTls
from rlmesh_ray.rllib.config.configure import configure
from rlmesh_ray.rllib.runner.env_runner import RLMeshEnvRunner


@dataclass(frozen=True, slots=True)
class _Task:
    env: str
    """``module:factory``."""
    env_kwargs: Mapping[str, object]
    num_endpoints: int
    num_runners: int
    num_nodes: int | None
    ray_address: str | None
    over_messages: bool
    """Whether endpoints do without shared memory, as if each were on a machine of its own."""
    timesteps: int
    """Of each call of a runner's ``sample``."""
    warm_up_s: float
    seconds: float


def main() -> None:
    """Do the work that standard input describes."""
    task = _Task(**json.loads(sys.stdin.readline()))
    parent = only_for_the_parent()
    factory = pkgutil.resolve_name(task.env)
    load = os.getloadavg()[0]
    with ray_nodes(task.num_nodes, task.ray_address):
        began_s = time.monotonic()
        config = PPOConfig().env_runners(
            num_env_runners=task.num_runners, num_cpus_per_env_runner=ACTOR_CPUS
        )
        with _endpoints(task, factory, config) as (config, node_ids):
            served_s = time.monotonic()
            runners = start_runners(config, task.num_runners, RLMeshEnvRunner)
            pids = ray.get([runner.apply.remote(_pid) for runner in runners])
            # Their first episodes begin here.
            ray.get([runner.sample.remote(num_timesteps=1) for runner in runners])
            _say(
                parent,
                load=load,
                nodes=sum(node["Alive"] for node in ray.nodes()),
                endpoints_by_node=endpoints_by_node(node_ids),
                endpoints_s=served_s - began_s,
                runners_s=time.monotonic() - served_s,
                runner_pids=pids,
                one_by_one=ray.get(runners[0].apply.remote(_why_one_by_one)),
            )
            _measure(runners, task, parent)
            ray.get([runner.stop.remote() for runner in runners])
    _say(parent, ended=True)


@contextlib.contextmanager
def _endpoints(
    task: _Task, factory: Callable[..., Any], config: AlgorithmConfig
) -> Iterator[tuple[AlgorithmConfig, list[str]]]:
    if task.over_messages:
        with HostedEndpoints(
            factory, task.env_kwargs, num_hosts=task.num_endpoints, transport="grpc"
        ) as hosted:
            node_ids = ray.get([actor.node_id.remote() for actor in hosted.actors])
            config = configure(config, hosted.addresses, token=hosted.token, tls=RayTls())
            yield config, node_ids
        return
    with EnvFleet(
        factory,
        num_endpoints=task.num_endpoints,
        env_kwargs=task.env_kwargs,
        num_cpus=ACTOR_CPUS,
        actor_options={"scheduling_strategy": "SPREAD"},
    ) as fleet:
        described = ray.get([actor.describe.remote() for actor in fleet.actors])
        yield configure(config, fleet), [each["node_id"] for each in described]


def start_runners(config: AlgorithmConfig, num_runners: int, runner_class: Any) -> list[Any]:
    """Start runners as actors on this process's node; they have their sessions soon.

    Args:
        config: Configured for endpoints, and for as many runners.
        num_runners: How many.
        runner_class: ``RLMeshEnvRunner``, or what derives from it.
    """
    actor_class: Any = ray.remote(num_cpus=ACTOR_CPUS, scheduling_strategy=beside_me())(
        runner_class
    )
    return [
        actor_class.remote(config=config, worker_index=index + 1, num_workers=num_runners)
        for index in range(num_runners)
    ]


def _measure(runners: list[Any], task: _Task, parent: TextIO) -> None:
    if not sys.stdin.readline():
        return
    warmed = [runner.apply.remote(_sampling(task.warm_up_s, task.timesteps)) for runner in runners]
    ray.get(warmed)
    _say(parent, begun=True)
    sampled = [runner.apply.remote(_sampling(task.seconds, task.timesteps)) for runner in runners]
    _say(parent, runners=ray.get(sampled))
    # Until the parent has read what this process and its children worked.
    sys.stdin.readline()


def _sampling(seconds: float, timesteps: int) -> Callable[[Any], dict[str, float]]:
    """Return the sampler in the runner's process; it returns steps, seconds and processor time."""

    def sample_for(runner: Any) -> dict[str, float]:
        num_steps, began_s, cpu_s = 0, time.perf_counter(), time.process_time()
        while True:
            num_steps += sum(map(len, runner.sample(num_timesteps=timesteps)))
            took_s = time.perf_counter() - began_s
            if took_s >= seconds:
                worked_s = time.process_time() - cpu_s
                return {"steps": num_steps, "seconds": took_s, "cpu_s": worked_s}

    return sample_for


def _pid(_: Any) -> int:
    return os.getpid()


def _why_one_by_one(runner: Any) -> str | None:
    why: str | None = runner.fast_path_disabled_reason
    return why


def _say(parent: TextIO, **fields: object) -> None:
    parent.write(json.dumps(fields) + "\n")
    parent.flush()


if __name__ == "__main__":
    main()
