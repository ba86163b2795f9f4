"""The session group and the environment of a runner whose lanes hold several agents each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Dict
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.env.vector.vector_multi_agent_env import VectorMultiAgentEnv

from rlmesh_ray.rllib.runner.autoreset_emulation import NextStepSession, SessionBatch
from rlmesh_ray.rllib.runner.multi_agent_columns import (
    AgentBatch,
    AgentColumns,
    AgentSpec,
    agents_of_lane,
)
from rlmesh_ray.rllib.runner.runner_env import LaneCall, LaneCalls, SteppedByRunner
from rlmesh_ray.rllib.runner.session_group import SessionGroup
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.gym_conversion import to_gymnasium
from rlmesh_ray.spaces.leaves import Column
from rlmesh_ray.spaces.multi_agent import ALL_AGENTS, AgentId


class SpacesOnlyMultiAgentEnv(SteppedByRunner, MultiAgentEnv):
    """The agents of a lane and their spaces, for RLlib; ``step`` is refused.

    Args:
        agents: The agents of the lane.
    """

    def __init__(self, agents: Sequence[AgentSpec]) -> None:
        self.possible_agents = [agent.agent_id for agent in agents]
        self.agents = self.possible_agents
        self.observation_spaces: dict[Any, Any] = {
            agent.agent_id: to_gymnasium(agent.observation) for agent in agents
        }
        self.action_spaces: dict[Any, Any] = {
            agent.agent_id: to_gymnasium(agent.action) for agent in agents
        }
        super().__init__()


class MultiAgentSessionGroup(SessionGroup[AgentBatch]):
    """A group whose lanes hold several agents each.

    It resets itself as RLlib's SyncVectorMultiAgentEnv does: the step after the end of a whole
    environment's episode ignores the actions and gives the first observations of the next one.
    Dicts by agent are in the order of ``possible_agents``, whichever order the environment gave.

    Actions are one dict by agent for each lane, of the agents that were observed last and have not
    ended. None stands for a lane in which RLlib's episode begins with the next result, so that
    no agent acts: if the environment's has not ended, agents that are in it act by fillers.

    Args:
        sessions: At least one open session; ``close`` closes them.
        contract: The contract of their endpoints.

    Raises:
        ContractMismatchError: The contract describes no multi-agent environment.
    """

    def __init__(self, sessions: Sequence[NextStepSession], contract: EnvContract) -> None:
        super().__init__(sessions)
        agents = agents_of_lane(contract)
        self._agents = AgentColumns(agents)
        self._acting = np.zeros((self.num_envs, len(agents)), np.bool_)
        self._is_over = np.zeros(self.num_envs, np.bool_)
        self._begins = np.ones(self.num_envs, np.bool_)

    def reset(
        self, seeds: Sequence[int] = (), options: Mapping[str, Any] | None = None
    ) -> AgentBatch:
        """See ``SessionGroup``."""
        self._acting[...] = False
        self._is_over[...] = False
        self._begins[...] = True
        return super().reset(seeds, options)

    def _columns(self, actions: Sequence[Mapping[AgentId, Any] | None]) -> list[Column]:
        self._begins = np.array([own is None for own in actions])
        self._acting[self._begins] = False
        return self._agents.actions([own or {} for own in actions], self._acting, self._is_over)

    def _result(self, batch: SessionBatch) -> AgentBatch:
        """Convert the result of all lanes, and note which agents act next."""
        result = self._agents.dicts(batch, self._acting, self._begins)
        for lane in np.flatnonzero(self._is_over).tolist():  # a new episode has begun there
            result.rewards[lane] = self._agents.for_all(0.0)
            for flags in (result.terminated, result.truncated):
                flags[lane] = {**self._agents.for_all(False), ALL_AGENTS: False}
        self._acting, self._is_over = result.acting, batch.terminated | batch.truncated
        return result


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
        super().__init__(close, call)
        lane = SpacesOnlyMultiAgentEnv(agents_of_lane(contract))
        self.num_envs = num_envs
        self.envs = [lane] * num_envs
        self.render_mode = contract.render_mode or None
        self.metadata = {**contract.metadata, "autoreset_mode": "next_step"}
        self.single_observation_spaces = lane.observation_spaces
        self.single_action_spaces = lane.action_spaces
        self.single_observation_space = Dict(lane.observation_spaces)
        self.single_action_space = Dict(lane.action_spaces)
