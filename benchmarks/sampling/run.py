"""A runner that samples, as a process of its own: ``python -m benchmarks.sampling.run``.

It reads a line of JSON and writes ``ready``, when ``inference="auto"`` has chosen. For each line
that follows it samples for a while, and writes how many env steps that brought and how many seconds
it took. There is no learner. On all sides the garbage collector leaves out what was loaded, as in
our remote runners.
"""

import json
import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO

import gymnasium
import ray
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from benchmarks.measured_process import only_for_the_parent
from rlmesh_ray.rllib.config.configure import configure
from rlmesh_ray.rllib.runner.env_runner import RLMeshEnvRunner
from rlmesh_ray.server.endpoint.gc_tuning import freeze_heap

_LOGICAL_CPUS = 2
_SEED = 1
_NUM_ACTIONS = 256


_CONFIGS: Mapping[str, type[AlgorithmConfig]] = {"PPO": PPOConfig, "SAC": SACConfig}


@dataclass(frozen=True, slots=True)
class RunnerTask:
    """What is sampled, and by whom."""

    env_id: str
    num_envs: int
    """Of the runner; a multiple of the endpoint's."""
    algorithm: str
    env_kwargs: Mapping[str, Any]
    kind: str
    """``endpoint``, ``rllib``, ``torchrl`` or ``bare``: ours, a peer's, or none at all."""
    address: str
    """Of the endpoint that hosts the environment."""
    inference: str
    """Of our runner; see ``configure``."""
    timesteps: int
    """Of each call of ``sample``."""
    turn_s: float
    """How long it samples at a time, at least."""


class _BareLoop:
    """Steps gymnasium's SyncVectorEnv with actions that were drawn beforehand."""

    torch_inference_reason = "there is no policy"

    def __init__(self, task: RunnerTask) -> None:
        self._venv = gymnasium.make_vec(
            task.env_id, task.num_envs, vectorization_mode="sync", **task.env_kwargs
        )
        self._venv.reset(seed=_SEED)
        self._venv.action_space.seed(_SEED)
        self._actions = [self._venv.action_space.sample() for _ in range(_NUM_ACTIONS)]

    def sample(self, *, num_timesteps: int) -> list[range]:
        """Step as often as it takes; return as many as there were env steps."""
        num_envs = self._venv.num_envs
        num_steps = -(-num_timesteps // num_envs)
        for step in range(num_steps):
            self._venv.step(self._actions[step % _NUM_ACTIONS])
        return [range(num_steps * num_envs)]

    def get_metrics(self) -> None:
        """There are none."""

    def stop(self) -> None:
        """Let go of the environments."""
        self._venv.close()


def sampling_runner(task: RunnerTask) -> SingleAgentEnvRunner:
    """Return a runner as on an actor, with an algorithm's default module; Ray must be running."""
    # Without a seed, as most trainings are: with one, "auto" must not choose by time.
    config = _CONFIGS[task.algorithm]()
    config.env_runners(num_env_runners=1, num_envs_per_env_runner=task.num_envs)
    runner_class = SingleAgentEnvRunner
    if task.address:
        config = configure(config, task.address, inference=task.inference)
        runner_class = RLMeshEnvRunner
    else:
        config.environment(task.env_id, env_config=dict(task.env_kwargs))
    # Index 0 is the local runner, whose heap is not frozen.
    return runner_class(config=config, worker_index=1, num_workers=1)


def main() -> None:
    """Do the work that standard input describes."""
    task = RunnerTask(**json.loads(sys.stdin.readline()))
    parent = only_for_the_parent()
    if task.kind == "bare":
        _take_turns(_BareLoop(task), task, parent)
        return
    if task.kind == "torchrl":
        from benchmarks.sampling.torchrl_collector import TorchRLCollector

        torch.set_num_threads(1)
        collector = TorchRLCollector(task.env_id, task.num_envs, task.env_kwargs, task.timesteps)
        _take_turns(collector, task, parent)
        return
    start_ray()
    try:
        _take_turns(sampling_runner(task), task, parent)
    finally:
        ray.shutdown()


def start_ray() -> None:
    """Start a Ray of this process's own, with as many threads of torch as on a runner's actor."""
    torch.set_num_threads(1)
    ray.init(
        address="local",
        num_cpus=_LOGICAL_CPUS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


def _take_turns(runner: Any, task: RunnerTask, parent: TextIO) -> None:
    freeze_heap()
    # In one call there are more batches than inference="auto" compares.
    sample_for(runner, 0.0, task.timesteps)
    _say(parent, ready=True)
    while sys.stdin.readline():
        env_steps, seconds = sample_for(runner, task.turn_s, task.timesteps)
        reason = getattr(runner, "torch_inference_reason", "RLlib knows nothing else")
        _say(parent, env_steps=env_steps, seconds=seconds, torch_reason=reason)
    runner.stop()


def sample_for(runner: Any, seconds: float, timesteps: int) -> tuple[int, float]:
    """Sample once or more; return the env steps in the episodes, and how long it took.

    As an algorithm does, this asks for the metrics each time, since a runner keeps all episodes
    until then: the garbage collector would have more to look through from second to second. To
    make metrics of them is RLlib's own work on all sides, and its time is not counted.
    """
    num_steps, took_s = 0, 0.0
    while took_s <= seconds:
        began_s = time.perf_counter()
        num_steps += sum(map(len, runner.sample(num_timesteps=timesteps)))
        took_s += time.perf_counter() - began_s
        runner.get_metrics()
    return num_steps, took_s


def _say(parent: TextIO, **fields: object) -> None:
    parent.write(json.dumps(fields) + "\n")
    parent.flush()


if __name__ == "__main__":
    main()
