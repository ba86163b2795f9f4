"""Algorithm configs by name, with a few settings for sampling from endpoints."""

from collections.abc import Callable

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig

from rlmesh_ray.errors import ConfigurationError


def algorithm_config(name: str) -> AlgorithmConfig:
    """Return a config of an algorithm: RLlib's default, with this package's preset if it has one.

    Raises:
        ConfigurationError: There is none of that name.
    """
    if name.upper() not in _CONFIGS:
        raise ConfigurationError(
            f"algorithm {name!r} is not one of {', '.join(sorted(_CONFIGS))}; other RLlib "
            "algorithms work through rlmesh_ray.rllib.configure in a script of your own"
        )
    return _CONFIGS[name.upper()]()


def ppo_config() -> PPOConfig:
    """Return a PPO config for small control tasks on few cores.

    The local runner samples (the endpoints do the stepping). Its short horizon suits such tasks,
    which it learns fast, and its falling learning rate keeps the policy stable later.
    """
    config = PPOConfig()
    config.training(
        gamma=0.99,
        lambda_=0.9,
        lr=[[0, 1e-3], [150_000, 1e-4]],
        clip_param=0.2,
        use_kl_loss=False,
        vf_loss_coeff=0.5,
        vf_clip_param=10_000.0,
        grad_clip=0.5,
        train_batch_size_per_learner=2048,
        minibatch_size=256,
        num_epochs=10,
    )
    config.env_runners(num_env_runners=0)
    config.learners(num_learners=0)
    return config


def dqn_config() -> DQNConfig:
    config = DQNConfig()
    _by_several_steps(config)
    return config


def sac_config() -> SACConfig:
    config = SACConfig()
    _by_several_steps(config)
    return config


_STEPS_A_CALL = 8
_LANES = 8


def _by_several_steps(config: DQNConfig | SACConfig) -> None:
    """Let each call of ``sample`` make several steps: the call costs more than a step.

    RLlib's defaults make one vector step and one update in each call, that is, the fewer updates
    for each step, the more lanes there are. Here, for any number of lanes, the ratio of updates to
    steps is that of RLlib's defaults with 8 lanes.
    """
    config.env_runners(rollout_fragment_length=_STEPS_A_CALL)
    config.training(training_intensity=config.train_batch_size_per_learner / _LANES)


_CONFIGS: dict[str, Callable[[], AlgorithmConfig]] = {
    "APPO": APPOConfig,
    "DQN": dqn_config,
    "IMPALA": IMPALAConfig,
    "PPO": ppo_config,
    "SAC": sac_config,
}
