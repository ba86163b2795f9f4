"""Private parts of RLlib.

``_env_to_module_connector``, ``_module_to_env_connector`` and ``_rl_module_spec`` of a config allow
early checks of modules. Without them it is as if custom ones were given: no checks.

With ``_model_config`` of a config ``--set model_config.KEY=VALUE`` keeps what was set before.
Without it, it replaces that.

``_env_runner_state_server`` of an algorithm has the state that runners of IMPALA and APPO pull.
Without it a runner is asked for it.

With ``_del_hanging`` of a multi-agent episode an episode that failed forgets actions without a
result. Without it they stay in its cache, which no learner reads.

The env runners inherit from RLlib's and use what those have for subclasses; that is not listed.
"""

from typing import Any

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode

UNKNOWN = "unknown: this RLlib does not tell"
"""Stands for a setting of a config that cannot be read; it is not None, so it counts as given."""

MODULE_SETTINGS = ("_model_config", "_rl_module_spec")
"""The attributes of a config that hold the settings of its module."""


def connector_of(config: AlgorithmConfig, kind: str) -> Any:
    """Return what ``env_runners(KIND_connector=...)`` was given; None: nothing.

    Args:
        config: The config.
        kind: ``"env_to_module"`` or ``"module_to_env"``.
    """
    return getattr(config, f"_{kind}_connector", UNKNOWN)


def module_spec_of(config: AlgorithmConfig) -> Any:
    """Return what ``rl_module(rl_module_spec=...)`` was given; None: nothing."""
    return getattr(config, "_rl_module_spec", UNKNOWN)


def model_config_of(config: AlgorithmConfig) -> Any:
    """Return what ``rl_module(model_config=...)`` was given; None or empty: nothing."""
    return getattr(config, "_model_config", None)


def state_server_of(algorithm: Algorithm) -> Any:
    """Return the actor from which runners pull their state; None: they are given it."""
    return getattr(algorithm, "_env_runner_state_server", None)


def forget_hanging(episode: MultiAgentEpisode, agent: Any) -> None:
    """Have an episode forget an action of an agent whose result it has not got."""
    forget = getattr(episode, "_del_hanging", None)
    if forget is not None:
        forget(agent)
