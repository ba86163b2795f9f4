"""A runner that samples, as a process of its own: ``python -m rlmesh_ray.rllib.sampling_run``.

It reads a line of JSON, says ``ready``, waits for a line, says ``begun`` when its warm-up is over,
and in the end how many env steps it has sampled, and in how many seconds. There is no algorithm:
nobody learns meanwhile.
"""

import json
import logging
import sys
import time
from dataclasses import dataclass
from typing import Any, TextIO

import ray
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from rlmesh_ray.rllib.configure import configure
from rlmesh_ray.rllib.env_runner import RLMeshEnvRunner
from rlmesh_ray.rllib.measured_process import only_for_the_parent

_LOGICAL_CPUS = 2
_SEED = 1


@dataclass(frozen=True, slots=True)
class _Task:
    env_id: str
    address: str
    """Of the endpoint; empty: RLlib's own runner, with the environments in its process."""
    num_envs: int
    """Of the runner."""
    timesteps: int
    """Of each call of ``sample``."""
    warm_up_s: float
    seconds: float


def sampling_runner(env_id: str, num_envs: int, *, address: str = "") -> SingleAgentEnvRunner:
    """Return a local runner of PPO's default module; Ray must be running.

    Args:
        env_id: Of the environment.
        num_envs: Lanes of the runner; a multiple of the endpoint's.
        address: Of the endpoint that hosts it; empty: RLlib's own runner.
    """
    config = PPOConfig().environment(env_id).debugging(seed=_SEED)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=num_envs)
    runner_class = SingleAgentEnvRunner
    if address:
        config, runner_class = configure(config, address), RLMeshEnvRunner
    return runner_class(config=config, worker_index=0, num_workers=0)


def main() -> None:
    """Do what standard input says."""
    task = _Task(**json.loads(sys.stdin.readline()))
    parent = only_for_the_parent()
    # For both alike, and as on a runner's actor: a network this small is not worth sharing.
    torch.set_num_threads(1)
    ray.init(
        address="local",
        num_cpus=_LOGICAL_CPUS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        runner = sampling_runner(task.env_id, task.num_envs, address=task.address)
        _measure(runner, task, parent)
        runner.stop()
    finally:
        ray.shutdown()


def _measure(runner: Any, task: _Task, parent: TextIO) -> None:
    _say(parent, ready=True)
    if not sys.stdin.readline():
        return
    _sample_for(runner, task.warm_up_s, task.timesteps)
    cpu_s = time.process_time()
    _say(parent, begun=True)
    num_steps, took_s = _sample_for(runner, task.seconds, task.timesteps)
    cpu_s = time.process_time() - cpu_s
    _say(parent, answers=num_steps, seconds=took_s, cpu_s=cpu_s, latencies_us=[])
    # Until the parent has read what this process and its children worked.
    sys.stdin.read()


def _sample_for(runner: Any, seconds: float, timesteps: int) -> tuple[int, float]:
    """Sample once or more; return the env steps in the episodes, and how long it took."""
    num_steps, began_s = 0, time.perf_counter()
    while True:
        num_steps += sum(map(len, runner.sample(num_timesteps=timesteps)))
        took_s = time.perf_counter() - began_s
        if took_s >= seconds:
            return num_steps, took_s


def _say(parent: TextIO, **fields: object) -> None:
    parent.write(json.dumps(fields) + "\n")
    parent.flush()


if __name__ == "__main__":
    main()
