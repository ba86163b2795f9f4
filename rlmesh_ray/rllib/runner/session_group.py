"""Several sessions that are stepped together: their lanes, one after the other."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlmesh_ray.polling import WakeupDescriptors
from rlmesh_ray.rllib.runner.autoreset_emulation import NextStepSession, SessionBatch
from rlmesh_ray.rllib.runner.lane_infos import joined
from rlmesh_ray.rllib.runner.multi_agent_columns import AgentColumns, agents_of_lane
from rlmesh_ray.spaces.batch import (
    Column,
    coerce,
    concatenate,
    drop_unit_axis,
    flatten,
    leaves,
    split,
    unflatten,
)
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.multi_agent import ALL_AGENTS, AgentId


class SessionGroup(abc.ABC):
    """Steps its sessions at once: every request leaves before the first answer is awaited.

    A subclass defines the form of actions and results.

    Args:
        sessions: At least one open session; ``close`` closes them.
    """

    def __init__(self, sessions: Sequence[NextStepSession]) -> None:
        self._sessions = list(sessions)
        self.num_envs = sum(session.num_lanes for session in self._sessions)

    @abc.abstractmethod
    def _columns(self, actions: Any) -> list[Column]:
        """Return the columns of a batch of actions over all lanes."""

    @abc.abstractmethod
    def _result(self, batch: SessionBatch) -> SessionBatch:
        """Return the result of all lanes in the group's form."""

    def reset(
        self, seeds: Sequence[int] = (), options: Mapping[str, Any] | None = None
    ) -> SessionBatch:
        """Start new episodes everywhere.

        Args:
            seeds: Empty, or one for each lane.
            options: Passed to the environments.

        Raises:
            RemoteEnvError: An environment raised or timed out; the group can only be closed then.
            EndpointError: A session broke; likewise.
        """
        batches = []
        first = 0
        for session in self._sessions:
            batches.append(session.reset(seeds[first : first + session.num_lanes], options))
            first += session.num_lanes
        return self._result(_joined(batches))

    def send(self, actions: Any) -> None:
        """Apply one action in each lane; ``receive`` returns the result.

        Args:
            actions: One for each lane; those of ended lanes are ignored.

        Raises:
            ConformanceError: ``actions`` has the wrong structure or dtype; nothing was sent.
            EndpointError: A session is broken.
        """
        columns = self._columns(actions)
        if len(self._sessions) == 1:
            self._sessions[0].send(columns)
            return
        widths = [session.num_lanes for session in self._sessions]
        for session, own in zip(self._sessions, split(columns, widths), strict=True):
            session.send(own)

    def receive(self) -> SessionBatch:
        """Return the result of the actions that were sent.

        Raises:
            RemoteEnvError: As with ``reset``.
            EndpointError: As with ``reset``.
        """
        return self._result(_joined([session.receive() for session in self._sessions]))

    def wakeup(self) -> WakeupDescriptors | None:
        """Return what becomes readable when the last session has answered; None: nothing does."""
        signals = [session.wakeup() for session in self._sessions]
        return None if None in signals else signals[-1]

    def call(self, name: str, arguments: Sequence[object]) -> tuple[Any, ...]:
        return tuple(one for session in self._sessions for one in session.call(name, arguments))

    def close(self) -> None:
        for session in self._sessions:
            session.close()


def _joined(batches: Sequence[SessionBatch]) -> SessionBatch:
    if len(batches) == 1:
        return batches[0]
    discarded: dict[int, str] = {}
    first = 0
    for batch in batches:
        discarded |= {first + lane: cause for lane, cause in batch.discarded.items()}
        first += len(batch.rewards)
    return SessionBatch(
        concatenate([batch.observation for batch in batches]),
        np.concatenate([batch.rewards for batch in batches]),
        np.concatenate([batch.terminated for batch in batches]),
        np.concatenate([batch.truncated for batch in batches]),
        joined([batch.infos for batch in batches]),
        discarded,
    )


class SingleAgentSessionGroup(SessionGroup):
    """A group whose lanes hold one agent each.

    Args:
        sessions: At least one open session; ``close`` closes them.
        contract: The contract of their endpoints.
    """

    def __init__(self, sessions: Sequence[NextStepSession], contract: EnvContract) -> None:
        super().__init__(sessions)
        self._contract = contract
        parts = leaves(contract.action_space)
        self._action = parts[0] if len(parts) == 1 and not parts[0].path else None
        """None: an action has several parts."""

    def _columns(self, actions: Any) -> list[Column]:
        leaf = self._action
        if (
            leaf is not None
            and leaf.dtype is not None
            and isinstance(actions, np.ndarray)
            and actions.shape == (self.num_envs, *leaf.shape)
            and np.can_cast(actions.dtype, leaf.dtype)
        ):
            # RLlib's integers have 32 bits: each of them fits, and needs no check.
            return [actions.astype(leaf.dtype, copy=False)]
        spec = self._contract.action_space
        return [
            coerce(part, drop_unit_axis(part, value), self.num_envs)
            for part, value in zip(leaves(spec), flatten(spec, actions), strict=True)
        ]

    def _result(self, batch: SessionBatch) -> SessionBatch:
        batch.observation = unflatten(self._contract.observation_space, batch.observation)
        return batch


class MultiAgentSessionGroup(SessionGroup):
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
    ) -> SessionBatch:
        self._acting[...] = False
        self._is_over[...] = False
        self._begins[...] = True
        return super().reset(seeds, options)

    def _columns(self, actions: Sequence[Mapping[AgentId, Any] | None]) -> list[Column]:
        self._begins = np.array([own is None for own in actions])
        self._acting[self._begins] = False
        return self._agents.actions([own or {} for own in actions], self._acting, self._is_over)

    def _result(self, batch: SessionBatch) -> SessionBatch:
        is_over = batch.terminated | batch.truncated
        self._acting = self._agents.dicts(batch, self._acting, self._begins)
        for lane in np.flatnonzero(self._is_over).tolist():  # a new episode has begun there
            batch.rewards[lane] = self._agents.for_all(0.0)
            for flags in (batch.terminated, batch.truncated):
                flags[lane] = {**self._agents.for_all(False), ALL_AGENTS: False}
        self._is_over = is_over
        return batch
