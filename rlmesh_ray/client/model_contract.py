"""The contract of an environment that a model is to act in."""

from typing import Any

import gymnasium

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym import from_gymnasium


def contract_of(env: Any) -> EnvContract:
    """Return the contract of ``env``: its own, or one made from its spaces.

    Raises:
        ConfigurationError: It is no environment.
    """
    if isinstance(env, EnvContract):
        return env
    contract = getattr(env, "contract", None)
    if isinstance(contract, EnvContract):
        return contract
    if not (hasattr(env, "observation_space") and hasattr(env, "action_space")):
        raise ConfigurationError(
            f"a {type(env).__name__} is no environment to act in: hand in the environment, or what "
            "its endpoint has told (RemoteVectorEnv.contract)"
        )
    is_vector = isinstance(env, gymnasium.vector.VectorEnv)
    spec = getattr(env, "spec", None)
    spec_id = spec.id if spec is not None else type(env).__name__
    return EnvContract(
        id=spec_id,
        observation_space=from_gymnasium(
            env.single_observation_space if is_vector else env.observation_space
        ),
        action_space=from_gymnasium(env.single_action_space if is_vector else env.action_space),
        num_envs=env.num_envs if is_vector else 1,
        autoreset_mode=AutoresetMode.DISABLED,
    )
