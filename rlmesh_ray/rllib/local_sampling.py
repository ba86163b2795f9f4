"""Sampling with a local runner, without an algorithm, to measure its rate."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray.rllib.config.configure import configure
from rlmesh_ray.rllib.runner.env_runner import RLMeshEnvRunner

_STEPS = 16
"""Vector steps of each fragment."""


@contextlib.contextmanager
def sampling(address: str, num_envs: int, *, seed: int) -> Iterator[Callable[[], int]]:
    """Yield a function that samples a fragment and returns its number of env steps.

    Ray must run. The module is PPO's default one for the spaces of the environment.

    Args:
        address: Address of the endpoint.
        num_envs: Lanes of the runner; a multiple of the endpoint's width.
        seed: Seed of the module and the environments.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on a runner's actor
    config = PPOConfig().debugging(seed=seed)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=num_envs)
    runner = RLMeshEnvRunner(config=configure(config, address), worker_index=0, num_workers=0)

    def sample() -> int:
        episodes = runner.sample(num_timesteps=_STEPS * num_envs)
        runner.get_metrics()  # the runner keeps all episodes until this call
        return sum(map(len, episodes))

    try:
        yield sample
    finally:
        runner.stop()
        torch.set_num_threads(num_threads)
