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

    The local runner samples (the endpoints do the stepping). It looks a short way ahead, which
    such tasks are learnt fast by, and its falling learning rate keeps what was learnt.
    """
    config = PPOConfig()
    config.training(
        gamma=0.98,
        lambda_=0.8,
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
