"""Several sessions that are stepped together: their lanes, one after the other.

With several agents in a lane, its columns are converted to RLlib's dicts by agent, and back.
"""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import ConformanceError, ContractMismatchError
from rlmesh_ray.polling import WakeupDescriptors
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.rllib.runner.autoreset_emulation import NextStepSession, SessionBatch, joined
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
from rlmesh_ray.spaces.contract import EnvContract, space_lines
from rlmesh_ray.spaces.multi_agent import (
    ALL_AGENTS,
    OBSERVATIONS,
    AgentId,
    agents_from_metadata,
    filler_of_leaf,
    lane_observation_space,
)
from rlmesh_ray.spaces.spec import DictSpec, Leaf, SpaceSpec, TupleSpec

COMMON_INFO = "__common__"
"""RLlib's key of the infos that belong to no agent."""


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """One agent of a multi-agent environment."""

    agent_id: AgentId
    """Its id in the environment and in RLlib."""
    key: str
    """Its key in the lane's spaces and infos."""
    observation: SpaceSpec
    action: SpaceSpec


def agents_of_lane(contract: EnvContract) -> tuple[AgentSpec, ...]:
    """Return the agents of a lane, in the order of its arrays.

    Args:
        contract: A contract whose metadata lists several agents for a lane.

    Raises:
        ContractMismatchError: Its metadata and spaces do not fit together; see
            ``spaces.multi_agent``.
    """
    keys = agents_from_metadata(contract.metadata.get(capabilities.MULTI_AGENT))
    space, actions = contract.observation_space, contract.action_space
    parts = dict(space.items) if isinstance(space, DictSpec) else {}
    observations = parts.get(OBSERVATIONS)
    if (
        not keys
        or not isinstance(observations, DictSpec)
        or not isinstance(actions, DictSpec)
        or not _keys(observations) == _keys(actions) == list(keys.values())
        or space != lane_observation_space(observations)
    ):
        raise ContractMismatchError(
            f"the contract of {contract.id} has the agents {list(keys)}, but its observation space "
            f"({', '.join(space_lines(space))}) and its action space "
            f"({', '.join(space_lines(actions))}) are not those of a lane that holds these agents; "
            "serve it with this package's EnvServer, or in the same way"
        )
    return tuple(
        AgentSpec(agent_id, key, observation, action)
        for (agent_id, key), (_, observation), (_, action) in zip(
            keys.items(), observations.items, actions.items, strict=True
        )
    )


def _keys(spec: DictSpec) -> list[str]:
    return [key for key, _ in spec.items]


class AgentColumns:
    """Converts the columns of a vector's lanes to dicts by agent, and back.

    Args:
        agents: The agents of each lane.
    """

    def __init__(self, agents: Sequence[AgentSpec]) -> None:
        self._ids = [agent.agent_id for agent in agents]
        self._keys = [agent.key for agent in agents]
        self._observations = _parts(agents, [agent.observation for agent in agents])
        self._actions = _parts(agents, [agent.action for agent in agents])

    def dicts(
        self, batch: SessionBatch, acted: NDArray[np.bool_], begins: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Convert the result of a step or reset in place: one dict by agent for each lane.

        Observations are of the agents that are present; rewards of those that have acted, and of
        absent ones whose reward is not 0; flags of those that are present, and of absent ones that
        have ended, with ``__all__``.

        Args:
            batch: Columns of the lanes' observation space, over all lanes; arrays are kept.
            acted: Whether an agent acted in this step: ``(num_lanes, num_agents)``.
            begins: For each lane: whether RLlib's episode begins with this result. It knows of no
                agent that has ended then, and lets all act that are present.

        Returns:
            Whether an agent acts next: ``(num_lanes, num_agents)``; False where the episode is
            over.
        """
        *observed, presences, rewards, terminations, truncations = batch.observation
        present = np.asarray(presences, np.bool_)
        ended = np.asarray(terminations, np.bool_), np.asarray(truncations, np.bool_)
        observations: list[dict[AgentId, Any]] = [{} for _ in present]
        for position, part in enumerate(self._observations):
            for lane in np.flatnonzero(present[:, position]).tolist():
                observations[lane][part.agent_id] = part.value(observed, lane)
        has_ended = ended[0] | ended[1]
        values = np.asarray(rewards)
        is_over = batch.terminated | batch.truncated
        batch.observation = observations
        batch.rewards = self._by_agent(values, acted | (values != 0.0))
        batch.terminated = self._with_all(ended[0], present | has_ended, batch.terminated)
        batch.truncated = self._with_all(ended[1], present | has_ended, batch.truncated)
        batch.infos = [self.infos(info) for info in batch.infos]
        acting: NDArray[np.bool_] = present & (begins[:, np.newaxis] | ~has_ended)
        acting[is_over] = False
        return acting

    def actions(
        self,
        actions: Sequence[Mapping[AgentId, Any]],
        acting: NDArray[np.bool_],
        is_ignored: NDArray[np.bool_],
    ) -> list[Column]:
        """Return the columns of a batch of actions, with fillers for agents that do not act.

        Args:
            actions: One entry for each lane, by agent.
            acting: Whether an agent has to act: ``(num_lanes, num_agents)``.
            is_ignored: For each lane: whether it ignores the actions.

        Raises:
            ConformanceError: An agent that has to act has no action, or one that does not fit its
                space, or another agent has an action.
        """
        for lane in np.flatnonzero(~is_ignored).tolist():
            self._require(actions[lane], acting[lane], lane)
        columns: list[Column] = []
        for part, acts in zip(self._actions, acting.T, strict=True):
            lanes = np.flatnonzero(acts).tolist()
            values = [flatten(part.spec, actions[lane][part.agent_id]) for lane in lanes]
            columns += [
                _column(leaf, len(actions), lanes, [leaf_values[index] for leaf_values in values])
                for index, leaf in enumerate(part.leaves)
            ]
        return columns

    def infos(self, infos: Mapping[str, Any]) -> dict[AgentId, Any]:
        keys = {key for key in self._keys if isinstance(infos.get(key), Mapping)}
        own: dict[AgentId, Any] = {
            agent: infos[key]
            for agent, key in zip(self._ids, self._keys, strict=True)
            if key in keys
        }
        given = infos.get(COMMON_INFO)
        common = {key: value for key, value in infos.items() if key not in {*keys, COMMON_INFO}}
        common |= given if isinstance(given, Mapping) else {}
        return {**own, COMMON_INFO: common} if common else own

    def for_all(self, value: Any) -> dict[AgentId, Any]:
        return dict.fromkeys(self._ids, value)

    def _require(self, given: Mapping[AgentId, Any], acts: NDArray[np.bool_], lane: int) -> None:
        """Refuse missing actions, which would have to be invented, and superfluous ones."""
        expected = [self._ids[position] for position in np.flatnonzero(acts)]
        for agent in (*expected, *given):
            if agent in expected and agent in given:
                continue
            has = "an" if agent in given else "no"
            raise ConformanceError(
                "structure",
                str(agent),
                f"has {has} action in lane {lane}; exactly the agents that were observed last and "
                f"have not ended must act: {expected}",
            )

    def _by_agent(self, values: NDArray[Any], mask: NDArray[np.bool_]) -> list[dict[AgentId, Any]]:
        """Return the elements that ``mask`` selects; both are ``(num_lanes, num_agents)``."""
        return [
            {agent: value for agent, value, is_in in zip(self._ids, row, own, strict=True) if is_in}
            for row, own in zip(values.tolist(), mask.tolist(), strict=True)
        ]

    def _with_all(
        self, flags: NDArray[np.bool_], mask: NDArray[np.bool_], of_lanes: NDArray[np.bool_]
    ) -> list[dict[AgentId, bool]]:
        by_agent = self._by_agent(flags, mask)
        return [
            {**own, ALL_AGENTS: of_lane}
            for own, of_lane in zip(by_agent, of_lanes.tolist(), strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _AgentColumns:
    """The part of a lane's columns that belongs to one agent."""

    agent_id: AgentId
    spec: SpaceSpec
    leaves: tuple[Leaf, ...]
    """Their paths begin with the agent's key."""
    columns: slice

    def value(self, columns: Sequence[Column], lane: int) -> Any:
        """Return the agent's value in ``lane``; arrays are views."""
        values = [column[lane] for column in columns[self.columns]]
        return (
            unflatten(self.spec, values)
            if isinstance(self.spec, (DictSpec, TupleSpec))
            else values[0]
        )


def _parts(agents: Sequence[AgentSpec], specs: Sequence[SpaceSpec]) -> list[_AgentColumns]:
    keys = [agent.key for agent in agents]
    all_leaves = leaves(DictSpec(tuple(zip(keys, specs, strict=True))))
    parts = []
    first = 0
    for agent, spec in zip(agents, specs, strict=True):
        end = first + len(leaves(spec))
        parts.append(_AgentColumns(agent.agent_id, spec, all_leaves[first:end], slice(first, end)))
        first = end
    return parts


def _column(leaf: Leaf, num_lanes: int, lanes: Sequence[int], values: Sequence[Any]) -> Column:
    filler = filler_of_leaf(leaf)
    if leaf.dtype is None:
        texts = [filler] * num_lanes
        for lane, value in zip(lanes, values, strict=True):
            texts[lane] = coerce(leaf, value, None)
        return tuple(texts)
    column = np.empty((num_lanes, *leaf.shape), leaf.dtype)
    column[...] = filler
    for lane, value in zip(lanes, values, strict=True):
        column[lane] = coerce(leaf, drop_unit_axis(leaf, value, 0), None)
    return column


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

    def reset(self, seeds: Sequence[int] = ()) -> SessionBatch:
        """Start new episodes everywhere.

        Args:
            seeds: Empty, or one for each lane.

        Raises:
            RemoteEnvError: An environment raised or timed out; the group can only be closed then.
            EndpointError: A session broke; likewise.
        """
        batches = []
        first = 0
        for session in self._sessions:
            batches.append(session.reset(seeds[first : first + session.num_lanes]))
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
    return SessionBatch(
        concatenate([batch.observation for batch in batches]),
        np.concatenate([batch.rewards for batch in batches]),
        np.concatenate([batch.terminated for batch in batches]),
        np.concatenate([batch.truncated for batch in batches]),
        joined([batch.infos for batch in batches]),
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

    def reset(self, seeds: Sequence[int] = ()) -> SessionBatch:
        self._acting[...] = False
        self._is_over[...] = False
        self._begins[...] = True
        return super().reset(seeds)

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
