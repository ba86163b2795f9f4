"""A learning run, as a process of its own: ``python -m benchmarks.learning.run --help``.

It writes a JSON line after each iteration, and one at the end. The settings are close to those of
RLlib's tuned examples, for few cores: one runner, of several lanes.
"""

import argparse
import json
import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TextIO

import ray
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

from benchmarks.measured_process import only_for_the_parent
from rlmesh_ray.rllib.checkpoint_folder import TrainingProgress
from rlmesh_ray.rllib.config.configure import configure
from rlmesh_ray.rllib.training import train

_CARTPOLE = "CartPole-v1"
_PENDULUM = "Pendulum-v1"
# Importing the module before the colon registers the environment.
_CATCH = "rlmesh_ray.testing.catch:rlmesh_ray/Catch-v0"
_LOGICAL_CPUS = 8
"""Ray counts one an actor, and most of these wait for each other."""


@dataclass(frozen=True, slots=True)
class _Task:
    env_id: str
    config: Callable[[], AlgorithmConfig]
    num_env_runners: int
    """0: the driver samples, and learns between its samples."""
    num_lanes: int


def _ppo_cartpole() -> AlgorithmConfig:
    config = PPOConfig().training(lr=3e-4, num_epochs=6, vf_loss_coeff=0.01)
    return config.rl_module(
        model_config=DefaultModelConfig(fcnet_hiddens=[32], fcnet_activation="linear")
    )


def _ppo_catch() -> AlgorithmConfig:
    config = PPOConfig().training(
        train_batch_size_per_learner=1024,
        minibatch_size=256,
        num_epochs=6,
        lr=5e-4,
        lambda_=0.9,
        entropy_coeff=0.01,
    )
    return config.rl_module(model_config=DefaultModelConfig(conv_filters=[[8, 4, 4], [16, 4, 4]]))


def _appo_cartpole() -> AlgorithmConfig:
    config = APPOConfig().training(
        train_batch_size_per_learner=1000,
        minibatch_size=250,
        num_epochs=2,
        lr=7.5e-4,
        vf_loss_coeff=0.05,
        entropy_coeff=0.01,
    )
    config.rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[32]))
    return config.reporting(min_time_s_per_iteration=2)


def _impala_cartpole() -> AlgorithmConfig:
    config = IMPALAConfig().training(
        train_batch_size_per_learner=500,
        lr=5e-4,
        grad_clip=40.0,
        grad_clip_by="global_norm",
        vf_loss_coeff=0.05,
        entropy_coeff=0.0,
    )
    config.rl_module(model_config=DefaultModelConfig(vf_share_layers=True))
    return config.reporting(min_time_s_per_iteration=2)


def _dqn_cartpole() -> AlgorithmConfig:
    config = DQNConfig().training(
        lr=5e-4,
        train_batch_size_per_learner=32,
        n_step=(2, 5),
        double_q=True,
        dueling=True,
        epsilon=[(0, 1.0), (10_000, 0.02)],
    )
    return config.rl_module(
        model_config=DefaultModelConfig(fcnet_hiddens=[256], head_fcnet_hiddens=[256])
    )


def _sac_pendulum() -> AlgorithmConfig:
    config = SACConfig().training(
        initial_alpha=1.001,
        actor_lr=2e-4,
        critic_lr=8e-4,
        alpha_lr=9e-4,
        lr=None,
        n_step=(2, 5),
        train_batch_size_per_learner=256,
        num_steps_sampled_before_learning_starts=256,
    )
    config.rl_module(
        model_config=DefaultModelConfig(fcnet_hiddens=[256, 256], fcnet_activation="relu")
    )
    return config.reporting(min_sample_timesteps_per_iteration=1000)


def _sac_pendulum_small() -> AlgorithmConfig:
    config = SACConfig().training(
        initial_alpha=1.001,
        actor_lr=5e-4,
        critic_lr=1e-3,
        alpha_lr=1e-3,
        lr=None,
        tau=0.01,
        replay_buffer_config={"type": "EpisodeReplayBuffer", "capacity": 50_000},
        train_batch_size_per_learner=64,
        num_steps_sampled_before_learning_starts=512,
        training_intensity=16.0,  # 16 updates for each sample of 8 steps of 8 lanes
    )
    config.env_runners(rollout_fragment_length=8)
    config.rl_module(
        model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="relu")
    )
    return config.reporting(min_sample_timesteps_per_iteration=800)


_TASKS = {
    "ppo-cartpole": _Task(_CARTPOLE, _ppo_cartpole, num_env_runners=0, num_lanes=8),
    "ppo-catch": _Task(_CATCH, _ppo_catch, num_env_runners=0, num_lanes=8),
    "appo-cartpole": _Task(_CARTPOLE, _appo_cartpole, num_env_runners=1, num_lanes=8),
    "impala-cartpole": _Task(_CARTPOLE, _impala_cartpole, num_env_runners=1, num_lanes=8),
    "dqn-cartpole": _Task(_CARTPOLE, _dqn_cartpole, num_env_runners=0, num_lanes=1),
    "sac-pendulum": _Task(_PENDULUM, _sac_pendulum, num_env_runners=0, num_lanes=1),
    "sac-pendulum-small": _Task(_PENDULUM, _sac_pendulum_small, num_env_runners=0, num_lanes=8),
}


def learning_config(task: str, seed: int, *, inference: str) -> AlgorithmConfig:
    """Return the config of a run; a fleet is started for it if it needs one.

    Args:
        task: One of ``benchmarks.learning.plan.Task``.
        seed: Of everything RLlib seeds.
        inference: Of our runner, as of ``configure``; empty: with RLlib's own runner.
    """
    chosen = _TASKS[task]
    config = chosen.config().debugging(seed=seed)
    config.env_runners(
        num_env_runners=chosen.num_env_runners, num_envs_per_env_runner=chosen.num_lanes
    )
    if inference:
        return configure(config, chosen.env_id, inference=inference)
    return config.environment(chosen.env_id)


def main(arguments: list[str] | None = None) -> None:
    """Learn, and send the parent the progress."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=_TASKS, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--stop-return", type=float, help="Else it learns for --most-steps.")
    parser.add_argument("--most-steps", type=int, required=True)
    parser.add_argument("--inference", default="", help="Through endpoints; else RLlib's runner.")
    options = parser.parse_args(arguments)
    parent = only_for_the_parent()
    torch.set_num_threads(1)  # as train() does
    ray.init(
        address="local",
        num_cpus=_LOGICAL_CPUS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        config = learning_config(options.task, options.seed, inference=options.inference)
        run = train(config, stop_return=options.stop_return, stop_timesteps=options.most_steps)
        for progress in run:
            _say(parent, progress)
    finally:
        ray.shutdown()
    parent.write(json.dumps({"done": True}) + "\n")
    parent.flush()


def _say(parent: TextIO, progress: TrainingProgress) -> None:
    mean = progress.return_mean
    fields = {**asdict(progress), "return_mean": None if math.isnan(mean) else mean}
    parent.write(json.dumps(fields) + "\n")
    parent.flush()


if __name__ == "__main__":
    main()
