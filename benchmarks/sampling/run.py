"""A runner that samples, as a process of its own: ``python -m benchmarks.sampling.run``.

It reads a line of JSON and writes ``ready``. For each line that follows it samples for a while, and
writes how many env steps that brought and how many seconds it took. There is no
learner.
"""

import json
import logging
import sys
import time
from dataclasses import dataclass
from typing import Any, TextIO

import gymnasium
import ray
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from benchmarks.measured_process import only_for_the_parent
from rlmesh_ray.rllib.config.configure import configure
from rlmesh_ray.rllib.runner.env_runner import RLMeshEnvRunner

_LOGICAL_CPUS = 2
_SEED = 1
_NUM_ACTIONS = 256


@dataclass(frozen=True, slots=True)
class _Task:
    env_id: str
    kind: str
    """``endpoint``, ``rllib`` or ``bare``: RLlib's own runner, or none at all."""
    address: str
    """Of the endpoint."""
    num_envs: int
    """Of the runner."""
    timesteps: int
    """Of each call of ``sample``."""
    turn_s: float
    """How long it samples at a time, at least."""


class _BareLoop:
    """Steps gymnasium's SyncVectorEnv with actions that were drawn beforehand."""

    def __init__(self, env_id: str, num_envs: int) -> None:
        self._venv = gymnasium.make_vec(env_id, num_envs, vectorization_mode="sync")
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
    """Do the work that standard input describes."""
    task = _Task(**json.loads(sys.stdin.readline()))
    parent = only_for_the_parent()
    if task.kind == "bare":
        _take_turns(_BareLoop(task.env_id, task.num_envs), task, parent)
        return
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
        _take_turns(sampling_runner(task.env_id, task.num_envs, address=task.address), task, parent)
    finally:
        ray.shutdown()


def _take_turns(runner: Any, task: _Task, parent: TextIO) -> None:
    _say(parent, ready=True)
    while sys.stdin.readline():
        env_steps, seconds = _sample_for(runner, task.turn_s, task.timesteps)
        _say(parent, env_steps=env_steps, seconds=seconds)
    runner.stop()


def _sample_for(runner: Any, seconds: float, timesteps: int) -> tuple[int, float]:
    """Sample once or more; return the env steps in the episodes, and how long it took.

    As an algorithm does, this asks for the metrics each time, since a runner keeps all episodes
    until then: the garbage collector would have more to look through from second to second. To
    make metrics of them is RLlib's own work on all sides, and its time is not counted.
    """
    num_steps, took_s = 0, 0.0
    while took_s < seconds:
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
