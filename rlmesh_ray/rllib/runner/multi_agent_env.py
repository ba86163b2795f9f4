"""The vector environment of a multi-agent EnvRunner: the lanes of several sessions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium.spaces import Dict
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.env.vector.vector_multi_agent_env import VectorMultiAgentEnv

from rlmesh_ray.polling import WakeupDescriptors
from rlmesh_ray.rllib.runner.multi_agent_columns import AgentColumns
from rlmesh_ray.rllib.runner.multi_agent_contract import AgentSpec, agents_of_lane
from rlmesh_ray.rllib.runner.next_step_session import (
    NextStepSession,
    SessionBatch,
    all_discarded,
    last_signal,
)
from rlmesh_ray.rllib.runner.runner_env import LaneCall
from rlmesh_ray.spaces.columns import concatenate, split
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.gym_conversion import to_gymnasium
from rlmesh_ray.spaces.multi_agent import ALL_AGENTS, AgentId

ByAgent = list[dict[AgentId, Any]]
"""One dict by agent a lane."""


class SpacesOnlyMultiAgentEnv(MultiAgentEnv):
    """Tells RLlib the agents of a lane and their spaces; stepped it cannot be.

    Args:
        agents: Of the lane.
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


@dataclass(frozen=True, slots=True)
class AgentBatch:
    """What all lanes of a group gave; one entry a lane everywhere, each by agent."""

    observations: ByAgent
    rewards: ByAgent
    terminated: ByAgent
    truncated: ByAgent
    infos: ByAgent
    discarded: Mapping[int, str] = field(default_factory=dict)
    """See ``SessionBatch``."""


class MultiAgentSessionGroup:
    """Steps its sessions at once: every request leaves before the first answer is awaited.

    It resets itself as RLlib's SyncVectorMultiAgentEnv does: the step after the end of a whole
    environment's episode ignores the actions and gives the first observations of the next one.
    Dicts by agent are in the order of ``possible_agents``, whatever order the environment gave.

    Args:
        sessions: Open; at least one; ``close`` closes them.
        contract: Theirs.

    Raises:
        ContractMismatchError: The contract describes no multi-agent environment.
    """

    def __init__(self, sessions: Sequence[NextStepSession], contract: EnvContract) -> None:
        self._sessions = list(sessions)
        agents = agents_of_lane(contract)
        self._columns = AgentColumns(agents)
        self.num_envs = sum(session.num_lanes for session in self._sessions)
        self._acting = np.zeros((self.num_envs, len(agents)), np.bool_)
        self._is_over = np.zeros(self.num_envs, np.bool_)

    def reset(
        self, seeds: Sequence[int] = (), options: Mapping[str, Any] | None = None
    ) -> AgentBatch:
        """Start new episodes everywhere.

        Args:
            seeds: Empty, or one a lane.
            options: Handed to the environments.

        Raises:
            RemoteEnvError: An environment raised or timed out; the group is good for nothing
                but ``close`` then.
            EndpointError: A session broke; likewise.
        """
        self._acting[...] = False
        batches = []
        first = 0
        for session in self._sessions:
            batches.append(session.reset(seeds[first : first + session.num_lanes], options))
            first += session.num_lanes
        return self._taken(batches)

    def send(self, actions: Sequence[Mapping[AgentId, Any]]) -> None:
        """Let the agents act that were observed last and have not ended.

        Args:
            actions: One entry a lane, each by agent; those of ended lanes are ignored.

        Raises:
            ConformanceError: ``actions`` are not those of these agents, or do not fit their
                spaces; nothing was sent.
            EndpointError: A session is broken.
        """
        columns = self._columns.actions(actions, self._acting, self._is_over)
        widths = [session.num_lanes for session in self._sessions]
        for session, own in zip(self._sessions, split(columns, widths), strict=True):
            session.send(own)

    def receive(self) -> AgentBatch:
        """Return what the actions that were sent have led to.

        Raises:
            RemoteEnvError: As with ``reset``.
            EndpointError: As with ``reset``.
        """
        restarted = np.flatnonzero(self._is_over).tolist()
        taken = self._taken([session.receive() for session in self._sessions])
        for lane in restarted:
            taken.rewards[lane] = self._columns.for_all(0.0)
            for flags in (taken.terminated, taken.truncated):
                flags[lane] = {**self._columns.for_all(False), ALL_AGENTS: False}
        return taken

    def wakeup(self) -> WakeupDescriptors | None:
        """Return what tells that ``receive`` has little to wait for; None: nothing does."""
        return last_signal(self._sessions)

    def call(self, name: str, arguments: Sequence[object]) -> tuple[Any, ...]:
        """Call into every lane, session by session; see ``EnvClient.call``."""
        return tuple(one for session in self._sessions for one in session.call(name, arguments))

    def close(self) -> None:
        """End the sessions."""
        for session in self._sessions:
            session.close()

    def _taken(self, batches: Sequence[SessionBatch]) -> AgentBatch:
        """Read what all sessions gave, and note who acts next."""
        terminated = np.concatenate([batch.terminated for batch in batches])
        truncated = np.concatenate([batch.truncated for batch in batches])
        columns = concatenate([batch.observation for batch in batches])
        dicts = self._columns.dicts(columns, terminated, truncated, self._acting)
        self._acting, self._is_over = dicts.acting, terminated | truncated
        infos = [self._columns.infos(info) for batch in batches for info in batch.infos]
        return AgentBatch(
            dicts.observations,
            dicts.rewards,
            dicts.terminated,
            dicts.truncated,
            infos,
            all_discarded(batches),
        )


class MultiAgentRunnerEnv(VectorMultiAgentEnv):
    """What RLlib and its callbacks see as the environment of a runner: spaces and width.

    It cannot be stepped: the runner steps the lanes of each session when they are ready.

    Args:
        contract: Of every endpoint.
        num_envs: Lanes of all sessions together.
        close: Ends the sessions.
        call: Calls an attribute, by name and with arguments, in every lane.

    Raises:
        ContractMismatchError: The contract describes no multi-agent environment.
    """

    def __init__(
        self, contract: EnvContract, num_envs: int, close: Callable[[], None], call: LaneCall
    ) -> None:
        super().__init__()
        directory = SpacesOnlyMultiAgentEnv(agents_of_lane(contract))
        self.num_envs = num_envs
        self.envs = [directory] * num_envs
        self.render_mode = contract.render_mode or None
        self.metadata = {**contract.metadata, "autoreset_mode": "next_step"}
        self.single_observation_spaces = directory.observation_spaces
        self.single_action_spaces = directory.action_spaces
        self.single_observation_space = Dict(directory.observation_spaces)
        self.single_action_space = Dict(directory.action_spaces)
        self._close = close
        self._call = call

    def call(self, name: str, *args: Any) -> tuple[Any, ...]:
        """Call a method of every lane's environment; see ``RunnerEnv.call``."""
        return self._call(name, args)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every lane's environment; as in gymnasium, methods are called."""
        return self._call(name, ())

    def close_extras(self, **_kwargs: Any) -> None:
        """End the sessions; ``close`` calls this."""
        self._close()
