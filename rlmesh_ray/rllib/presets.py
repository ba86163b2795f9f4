"""Algorithm configs by name, with the few settings that endpoints call for."""

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig

from rlmesh_ray.errors import ConfigurationError

_CONFIGS: dict[str, type[AlgorithmConfig]] = {
    "APPO": APPOConfig,
    "DQN": DQNConfig,
    "IMPALA": IMPALAConfig,
    "PPO": PPOConfig,
    "SAC": SACConfig,
}


def algorithm_config(name: str) -> AlgorithmConfig:
    """Return RLlib's default config of an algorithm; PPO's with this package's preset.

    Raises:
        ConfigurationError: There is none of that name.
    """
    if name.upper() not in _CONFIGS:
        raise ConfigurationError(
            f"algorithm {name!r} is not one of {', '.join(sorted(_CONFIGS))}; other RLlib "
            "algorithms work through rlmesh_ray.rllib.configure in a script of your own"
        )
    if name.upper() == "PPO":
        return ppo_config()
    return _CONFIGS[name.upper()]()


def ppo_config() -> PPOConfig:
    """Return a PPO config for small control tasks on few cores.

    The local runner samples (the endpoints do the stepping), batches are small and pass through
    the learner a few times only: on two cores RLlib's own defaults spend most of the time in
    the learner.
    """
    config = PPOConfig()
    config.training(
        lr=3e-4,
        gamma=0.99,
        lambda_=0.95,
        train_batch_size_per_learner=4096,
        minibatch_size=256,
        num_epochs=6,
        vf_loss_coeff=0.01,
        entropy_coeff=0.0,
        grad_clip=0.5,
    )
    config.env_runners(num_env_runners=0)
    config.learners(num_learners=0)
    return config
