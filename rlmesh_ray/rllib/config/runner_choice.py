"""The choice of the runner class for an environment, and of the spaces for RLlib."""

from dataclasses import dataclass
from typing import Any

import gymnasium
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.rllib.runner.env_runner import RLMeshEnvRunner, RLMeshMultiAgentEnvRunner
from rlmesh_ray.rllib.runner.multi_agent_columns import agents_of_lane
from rlmesh_ray.rllib.runner.runner_env import SpacesOnlyMultiAgentEnv
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.gym_conversion import to_gymnasium

_STANDARD = (
    SingleAgentEnvRunner,
    MultiAgentEnvRunner,
    RLMeshEnvRunner,
    RLMeshMultiAgentEnvRunner,
)


@dataclass(frozen=True, slots=True)
class RunnerChoice:
    """The parts of a config that follow from the environment of its endpoints."""

    runner_class: type[Any]
    observation_space: gymnasium.Space[Any]
    """Observation space of one lane; with several agents, a Dict by agent."""
    action_space: gymnasium.Space[Any]
    """Likewise."""
    is_multi_agent: bool = False


def choose_runner(config: AlgorithmConfig, contract: EnvContract) -> RunnerChoice:
    """Choose the runner class for the environment that the endpoints serve.

    Raises:
        ConfigurationError: The config names another EnvRunner, which is not made for endpoints, or
            it has policies for several agents where the environment has one.
        ContractMismatchError: The contract of several agents contradicts itself.
    """
    if capabilities.MULTI_AGENT in contract.metadata:
        return _multi_agent_choice(config, contract)
    if config.is_multi_agent:
        raise ConfigurationError(
            f"multi_agent(policies=...) is set, but {contract.id} has one agent; leave it out"
        )
    return RunnerChoice(
        runner_class=_runner_class(config, RLMeshEnvRunner),
        observation_space=to_gymnasium(contract.observation_space),
        action_space=to_gymnasium(contract.action_space),
    )


def _multi_agent_choice(config: AlgorithmConfig, contract: EnvContract) -> RunnerChoice:
    lane = SpacesOnlyMultiAgentEnv(agents_of_lane(contract))
    return RunnerChoice(
        runner_class=_runner_class(config, RLMeshMultiAgentEnvRunner),
        observation_space=gymnasium.spaces.Dict(lane.observation_spaces),
        action_space=gymnasium.spaces.Dict(lane.action_spaces),
        is_multi_agent=True,
    )


def _runner_class(config: AlgorithmConfig, ours: type[Any]) -> type[Any]:
    wanted: type[Any] | None = config.env_runner_cls
    if wanted is None or wanted in _STANDARD:
        return ours
    if not issubclass(wanted, ours):
        raise ConfigurationError(
            f"env_runner_cls={wanted.__name__} does not sample from endpoints; derive it from "
            f"rlmesh_ray.rllib.{ours.__name__}, or leave it out"
        )
    return wanted
