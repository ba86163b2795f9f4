"""How long a runner is without its lanes when their endpoint's process is killed."""

import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.env_runner import NUM_ENV_STEP_FAILURES_LIFETIME

from rlmesh_ray.actors.env_fleet import EnvFleet
from rlmesh_ray.errors import EndpointLostError
from rlmesh_ray.rllib.config.configure import configure
from rlmesh_ray.rllib.runner.env_runner import RLMeshEnvRunner

_TIMESTEPS = 64
"""Of each call of ``sample``: about ten milliseconds, which is how exact the figures are."""
_LONGEST_PAUSE_S = 2.0
_PATIENCE_S = 120.0


def recoveries(num_kills: int, *, seed: int) -> Iterator[float]:
    """Kill an endpoint again and again, at random moments of a runner's sampling.

    The endpoint and the runner are actors on Ray, which must be running on this machine alone.
    Ray restarts the endpoint elsewhere; the runner must not be restarted.

    Args:
        num_kills: How often.
        seed: Of the moments.

    Yields:
        Seconds from a kill until the runner has sampled on a new session.

    Raises:
        EndpointLostError: Sampling did not go on, or the runner's process is another one now.
    """
    moments = random.Random(seed)
    with EnvFleet("CartPole-v1", num_envs=8, num_cpus=0.1) as fleet:
        config = PPOConfig().env_runners(num_env_runners=1, num_envs_per_env_runner=8)
        config = configure(config.debugging(seed=seed), fleet)
        actor_class: Any = ray.remote(num_cpus=0.1, max_restarts=-1)(RLMeshEnvRunner)
        runner = actor_class.remote(config=config, worker_index=1, num_workers=1)
        pid = _pid_of(runner)
        for _ in range(num_kills):
            _sample_for(runner, moments.uniform(0.0, _LONGEST_PAUSE_S))
            yield _recovery_s(runner, ray.get(fleet.actors[0].describe.remote())["pid"])
            if _pid_of(runner) != pid:
                raise EndpointLostError("the runner's actor has been restarted", "")
        ray.get(runner.stop.remote())


def _sample_for(runner: Any, seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        ray.get(runner.sample.remote(num_timesteps=_TIMESTEPS))


def _recovery_s(runner: Any, victim: int) -> float:
    ray.get(runner.get_metrics.remote())
    sampling = runner.sample.remote(num_timesteps=_TIMESTEPS)
    os.kill(victim, signal.SIGKILL)
    killed_s = time.monotonic()
    while time.monotonic() < killed_s + _PATIENCE_S:
        ray.get(sampling)
        sampled_s = time.monotonic()
        # Since it was asked the last time.
        if NUM_ENV_STEP_FAILURES_LIFETIME in ray.get(runner.get_metrics.remote()):
            return sampled_s - killed_s
        sampling = runner.sample.remote(num_timesteps=_TIMESTEPS)
    raise EndpointLostError(f"nothing was sampled within {_PATIENCE_S:.0f} s of a kill", "")


def _pid_of(runner: Any) -> int:
    return int(ray.get(runner.apply.remote(lambda _: os.getpid())))
