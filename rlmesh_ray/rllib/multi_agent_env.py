"""The vector environment of a multi-agent EnvRunner: the lanes of several sessions."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Dict
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.env.vector.vector_multi_agent_env import VectorMultiAgentEnv

from rlmesh_ray.rllib.lane_session import LaneBatch, LaneSession
from rlmesh_ray.rllib.multi_agent_columns import ALL_AGENTS, AgentColumns, AgentDicts
from rlmesh_ray.rllib.multi_agent_contract import AgentSpec, agents_of_lane
from rlmesh_ray.spaces.columns import concatenate, split
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.gym import to_gymnasium

ByAgent = list[dict[str, Any]]
"""One dict by agent a lane."""


class AgentDirectory(MultiAgentEnv):
    """Tells RLlib the agents of a lane and their spaces; stepped it cannot be.

    Args:
        agents: Of the lane.
    """

    def __init__(self, agents: Sequence[AgentSpec]) -> None:
        self.possible_agents = [agent.agent_id for agent in agents]
        self.agents = self.possible_agents
        self.observation_spaces = {
            agent.agent_id: to_gymnasium(agent.observation) for agent in agents
        }
        self.action_spaces = {agent.agent_id: to_gymnasium(agent.action) for agent in agents}
        super().__init__()


class MultiAgentLaneGroup(VectorMultiAgentEnv):
    """Steps all sessions at once: every request leaves before the first answer is awaited.

    It resets itself as RLlib's SyncVectorMultiAgentEnv does: the step after the end of a whole
    environment's episode ignores the actions and gives the first observations of the next one.
    Dicts by agent are in the order of ``possible_agents``, whatever order the environment gave.

    Args:
        sessions: Open; at least one; ``close`` closes them.
        contract: Theirs.

    Raises:
        ContractMismatchError: The contract describes no multi-agent environment.
    """

    def __init__(self, sessions: Sequence[LaneSession], contract: EnvContract) -> None:
        super().__init__()
        self._sessions = list(sessions)
        agents = agents_of_lane(contract)
        self._columns = AgentColumns(agents)
        self.num_envs = sum(session.num_lanes for session in self._sessions)
        self._acting = np.zeros((self.num_envs, len(agents)), np.bool_)
        self._is_over = np.zeros(self.num_envs, np.bool_)
        directory = AgentDirectory(agents)
        self.envs = [directory] * self.num_envs
        self.render_mode = contract.render_mode or None
        self.metadata = {**contract.metadata, "autoreset_mode": "next_step"}
        self.single_observation_spaces = directory.observation_spaces
        self.single_action_spaces = directory.action_spaces
        self.single_observation_space = Dict(directory.observation_spaces)
        self.single_action_space = Dict(directory.action_spaces)

    def reset(
        self,
        *,
        seed: int | Sequence[int] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[ByAgent, ByAgent]:
        """Start new episodes everywhere; lane i of the whole group gets ``seed + i``."""
        self._acting[...] = False
        seeds = [seed + lane for lane in range(self.num_envs)] if isinstance(seed, int) else seed
        batches = []
        first = 0
        for session in self._sessions:
            own = seeds[first : first + session.num_lanes] if seeds else ()
            batches.append(session.reset(own, options))
            first += session.num_lanes
        dicts, infos = self._taken(batches)
        return dicts.observations, infos

    def step(
        self, actions: Sequence[Mapping[str, Any]]
    ) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]:
        """Let the agents act that were observed last and have not ended.

        Args:
            actions: One entry a lane, each by agent; those of ended lanes are ignored.

        Returns:
            Observations, rewards, terminateds, truncateds and infos, one entry a lane.

        Raises:
            ConformanceError: ``actions`` are not those of these agents, or do not fit their
                spaces; nothing was sent.
            RemoteEnvError: An environment raised or timed out; the group is good for nothing
                but ``close`` then.
            EndpointError: A session broke; likewise.
        """
        columns = self._columns.actions(actions, self._acting, self._is_over)
        widths = [session.num_lanes for session in self._sessions]
        for session, own in zip(self._sessions, split(columns, widths), strict=True):
            session.send(own)
        restarted = np.flatnonzero(self._is_over).tolist()
        dicts, infos = self._taken([session.receive() for session in self._sessions])
        for lane in restarted:
            dicts.rewards[lane] = self._columns.for_all(0.0)
            for flags in (dicts.terminated, dicts.truncated):
                flags[lane] = {**self._columns.for_all(False), ALL_AGENTS: False}
        return dicts.observations, dicts.rewards, dicts.terminated, dicts.truncated, infos

    def close_extras(self, **_kwargs: Any) -> None:
        """End the sessions; ``close`` calls this."""
        for session in self._sessions:
            session.close()

    def _taken(self, batches: Sequence[LaneBatch]) -> tuple[AgentDicts, ByAgent]:
        """Read what all sessions gave, and note who acts next."""
        terminated = np.concatenate([batch.terminated for batch in batches])
        truncated = np.concatenate([batch.truncated for batch in batches])
        columns = concatenate([batch.observation for batch in batches])
        dicts = self._columns.dicts(columns, terminated, truncated, self._acting)
        self._acting, self._is_over = dicts.acting, terminated | truncated
        infos = [self._columns.infos(info) for batch in batches for info in batch.infos]
        return dicts, infos
