"""The environment of a runner, as RLlib and its callbacks see it."""

from collections.abc import Callable
from typing import Any, NoReturn

import gymnasium
from gymnasium.spaces import Dict
from gymnasium.vector.utils import batch_space
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.env.env_context import EnvContext
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.env.vector.vector_multi_agent_env import VectorMultiAgentEnv

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol.capabilities import SET_ATTR
from rlmesh_ray.rllib.runner.session_group import agents_of_lane
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.gym_conversion import to_gymnasium

LaneCall = Callable[[str, tuple[object, ...]], tuple[Any, ...]]
"""Calls an attribute, by name and with arguments, in every lane; one result for each lane."""


class SteppedByRunner:
    """Says what to do instead where a callback or a runner's subclass steps an environment."""

    def reset(self, *_args: Any, **_options: Any) -> NoReturn:
        """Refuse: an episode of ``sample`` would lose its environment."""
        raise _only_sampled("reset")

    def step(self, *_args: Any) -> NoReturn:
        """Refuse: a step would be missing in an episode of ``sample``."""
        raise _only_sampled("step")

    def render(self) -> NoReturn:
        raise ConfigurationError(
            "the environments of this runner are at endpoints: instead of env.render(), call "
            'env.call("render"), which their operator has to allow (EnvServer(..., '
            'allow_calls=["render"]))'
        )


def _only_sampled(method: str) -> ConfigurationError:
    return ConfigurationError(
        f"this runner steps and resets its environments itself, at endpoints: instead of "
        f"env.{method}(), call env_runner.sample(num_timesteps=1, force_reset=True), which returns "
        "episodes"
    )


class LaneCalls(SteppedByRunner):
    """The methods of a vector environment that reach into its lanes.

    Args:
        contract: The contract of every endpoint.
        num_envs: Lanes of all sessions together.
        close: Ends the sessions.
        call: Calls an attribute in every lane.
    """

    def __init__(
        self, contract: EnvContract, num_envs: int, close: Callable[[], None], call: LaneCall
    ) -> None:
        self.num_envs = num_envs
        self.render_mode = contract.render_mode or None
        self._close = close
        self._call = call

    def call(self, name: str, *args: Any) -> tuple[Any, ...]:
        """Call a method of every lane's environment, if the endpoints allow it.

        It works as in gymnasium's vector environments, and between steps: see ``EnvClient.call``.
        Lanes whose session is lost return None; a call with arguments is repeated in the new one.
        """
        return self._call(name, args)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        return self._call(name, ())

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute to one value in every lane; see ``RemoteVectorEnv.set_attr``.

        New sessions get the value, too, as with ``call``.

        Raises:
            ConfigurationError: ``values`` is a list or tuple, or the operator of an endpoint does
                not allow the call ``set_wrapper_attr``.
        """
        if isinstance(values, list | tuple):
            raise ConfigurationError(
                f"set_attr sets one value of {name} in all lanes, and gymnasium takes a "
                f"{type(values).__name__} for one value per lane; to set the "
                f"{type(values).__name__} itself, call env.call({SET_ATTR!r}, {name!r}, value)"
            )
        self._call(SET_ATTR, (name, values))

    def close_extras(self, **_kwargs: Any) -> None:
        """End the sessions; ``close`` calls this."""
        self._close()


class RunnerEnv(LaneCalls, gymnasium.vector.VectorEnv[Any, Any, Any]):
    """The spaces and the number of a runner's lanes.

    The runner steps the lanes of each session when they are ready; ``step`` is refused.

    Args:
        contract: The contract of every endpoint.
        num_envs: Lanes of all sessions together.
        close: Ends the sessions.
        call: Calls an attribute in every lane.
    """

    def __init__(
        self, contract: EnvContract, num_envs: int, close: Callable[[], None], call: LaneCall
    ) -> None:
        super().__init__(contract, num_envs, close, call)
        self.metadata = {
            **contract.metadata,
            "autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP,
        }
        self.single_observation_space = to_gymnasium(contract.observation_space)
        self.single_action_space = to_gymnasium(contract.action_space)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)


class SpacesOnlyMultiAgentEnv(SteppedByRunner, MultiAgentEnv):
    """The agents of a lane and their spaces, for RLlib; ``step`` is refused.

    Args:
        contract: A contract whose lanes hold several agents.

    Raises:
        ContractMismatchError: It contradicts itself.
    """

    def __init__(self, contract: EnvContract) -> None:
        agents = agents_of_lane(contract)
        self.possible_agents = [agent.agent_id for agent in agents]
        self.agents = self.possible_agents
        self.observation_spaces: dict[Any, Any] = {
            agent.agent_id: to_gymnasium(agent.observation) for agent in agents
        }
        self.action_spaces: dict[Any, Any] = {
            agent.agent_id: to_gymnasium(agent.action) for agent in agents
        }
        super().__init__()


class MultiAgentRunnerEnv(LaneCalls, VectorMultiAgentEnv):
    """The spaces of a runner's agents, and the number of its lanes.

    The runner steps the lanes of each session when they are ready; ``step`` is refused.

    Args:
        contract: The contract of every endpoint.
        num_envs: Lanes of all sessions together.
        close: Ends the sessions.
        call: Calls an attribute in every lane.

    Raises:
        ContractMismatchError: The contract describes no multi-agent environment.
    """

    def __init__(
        self, contract: EnvContract, num_envs: int, close: Callable[[], None], call: LaneCall
    ) -> None:
        super().__init__(contract, num_envs, close, call)
        lane = SpacesOnlyMultiAgentEnv(contract)
        self.envs = [lane] * num_envs
        self.metadata = {**contract.metadata, "autoreset_mode": "next_step"}
        self.single_observation_spaces = lane.observation_spaces
        self.single_action_spaces = lane.action_spaces
        self.single_observation_space = Dict(lane.observation_spaces)
        self.single_action_space = Dict(lane.action_spaces)


def announce_environment(runner: Any) -> None:
    make_callback(
        "on_environment_created",
        callbacks_objects=runner._callbacks,
        callbacks_functions=runner.config.callbacks_on_environment_created,
        kwargs={
            "env_runner": runner,
            "metrics_logger": runner.metrics,
            "env": runner.env.unwrapped,
            "env_context": EnvContext(
                runner.config.env_config,
                worker_index=runner.worker_index,
                num_workers=runner.num_workers,
                remote=False,
            ),
        },
    )
