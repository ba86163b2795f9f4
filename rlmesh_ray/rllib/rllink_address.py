"""``configure(config, "rllink://HOST:PORT")``: the short form of ``configure_rllink``."""

from collections.abc import Mapping
from typing import TypeVar

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rlmesh_ray.credentials.token_file import TokenSource
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.rllib.rllink_configure import configure_rllink

ConfigT = TypeVar("ConfigT", bound=AlgorithmConfig)

_SCHEME = "rllink://"


def names_rllink(env: object) -> bool:
    """Tell whether ``env`` says where to listen for simulators, in place of what to sample from."""
    return isinstance(env, str) and env.startswith(_SCHEME)


def listen(
    config: ConfigT, env: str, token: TokenSource | None, unused: Mapping[str, object | None]
) -> ConfigT:
    """Let ``config`` learn from simulators that connect, with the spaces that it has.

    Args:
        config: With ``environment(observation_space=..., action_space=...)``.
        env: ``rllink://HOST:PORT``, where to listen.
        token: What simulators must show.
        unused: Other arguments of ``configure``, by name, None where they have not been given.

    Raises:
        ConfigurationError: The spaces are missing, or an argument means nothing here.
    """
    for name, value in unused.items():
        if value is not None:
            raise ConfigurationError(
                f"{name}=... is for endpoints, and {env} says where simulators connect; "
                "configure_rllink() has what can be set for them"
            )
    if config.observation_space is None or config.action_space is None:
        raise ConfigurationError(
            f"nobody at {env} can be asked for spaces before simulators connect; say them: "
            "config.environment(observation_space=..., action_space=...)"
        )
    return configure_rllink(
        config,
        observation_space=config.observation_space,
        action_space=config.action_space,
        address=env.removeprefix(_SCHEME),
        token=token,
        num_simulators=config.num_envs_per_env_runner,
    )
