"""The lanes of several sessions that are stepped together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.polling import WakeupDescriptors
from rlmesh_ray.rllib.runner.lane_infos import joined
from rlmesh_ray.rllib.runner.next_step_session import (
    NextStepSession,
    SessionBatch,
    all_discarded,
    last_signal,
)
from rlmesh_ray.spaces.batch import Column, leaves, unflatten
from rlmesh_ray.spaces.columns import concatenate, split
from rlmesh_ray.spaces.conformance import coerce_batch
from rlmesh_ray.spaces.contract import EnvContract


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """What all lanes of a group gave; one entry a lane everywhere."""

    observation: Any
    """As gymnasium's vector environments give it. It owns its memory: RLlib's episodes keep views
    of it."""
    rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    infos: Sequence[dict[str, Any]]
    discarded: Mapping[int, str] = field(default_factory=dict)
    """See ``SessionBatch``."""


class SessionGroup:
    """Steps its sessions at once: every request leaves before the first answer is awaited.

    Args:
        sessions: Open; at least one; ``close`` closes them.
        contract: Theirs.
    """

    def __init__(self, sessions: Sequence[NextStepSession], contract: EnvContract) -> None:
        self._sessions = list(sessions)
        self._contract = contract
        parts = leaves(contract.action_space)
        self._action = parts[0] if len(parts) == 1 and not parts[0].path else None
        """None: an action has several parts."""
        self.num_envs = sum(session.num_lanes for session in self._sessions)

    def reset(
        self, seeds: Sequence[int] = (), options: Mapping[str, Any] | None = None
    ) -> GroupBatch:
        """Start new episodes everywhere.

        Args:
            seeds: Empty, or one a lane.
            options: Handed to the environments.

        Raises:
            RemoteEnvError: An environment raised or timed out; the group is good for nothing
                but ``close`` then.
            EndpointError: A session broke; likewise.
        """
        batches = []
        first = 0
        for session in self._sessions:
            batches.append(session.reset(seeds[first : first + session.num_lanes], options))
            first += session.num_lanes
        return self._join(batches)

    def send(self, actions: Any) -> None:
        """Apply one action a lane; ``receive`` returns the result.

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

    def _columns(self, actions: Any) -> list[Column]:
        leaf = self._action
        if (
            leaf is not None
            and leaf.dtype is not None
            and isinstance(actions, np.ndarray)
            and actions.shape == (self.num_envs, *leaf.shape)
            and np.can_cast(actions.dtype, leaf.dtype)
        ):
            # RLlib's integers are of 32 bits: each of them fits, nobody needs to look.
            return [actions.astype(leaf.dtype, copy=False)]
        return coerce_batch(self._contract.action_space, actions, self.num_envs)

    def receive(self) -> GroupBatch:
        """Return what the actions that were sent have led to.

        Raises:
            RemoteEnvError: As with ``reset``.
            EndpointError: As with ``reset``.
        """
        return self._join([session.receive() for session in self._sessions])

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

    def _join(self, batches: Sequence[SessionBatch]) -> GroupBatch:
        space = self._contract.observation_space
        if len(batches) == 1:
            [one] = batches
            observation = unflatten(space, one.observation)
            return GroupBatch(
                observation,
                one.rewards,
                one.terminated,
                one.truncated,
                one.infos,
                one.discarded,
            )
        return GroupBatch(
            unflatten(space, concatenate([batch.observation for batch in batches])),
            np.concatenate([batch.rewards for batch in batches]),
            np.concatenate([batch.terminated for batch in batches]),
            np.concatenate([batch.truncated for batch in batches]),
            joined([batch.infos for batch in batches]),
            all_discarded(batches),
        )
