"""The vector environment of an EnvRunner: the lanes of several sessions, side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from rlmesh_ray.rllib.lane_session import LaneBatch, LaneSession
from rlmesh_ray.spaces.batch import unflatten
from rlmesh_ray.spaces.columns import concatenate, split
from rlmesh_ray.spaces.conformance import coerce_batch
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.gym import to_gymnasium

StepTuple = tuple[
    Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], list[dict[str, Any]]
]


class LaneGroup(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Steps all sessions at once: every request leaves before the first answer is awaited.

    Infos are lists of one dict a lane, the form that RLlib wants, instead of gymnasium's dict
    of arrays. Observations own their memory: RLlib's episodes keep views of them.

    Args:
        sessions: Open; at least one; ``close`` closes them.
        contract: Theirs.
    """

    def __init__(self, sessions: Sequence[LaneSession], contract: EnvContract) -> None:
        self._sessions = list(sessions)
        self._contract = contract
        self.num_envs = sum(session.num_lanes for session in self._sessions)
        self.render_mode = contract.render_mode or None
        self.metadata = {
            **contract.metadata,
            "autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP,
        }
        self.single_observation_space = to_gymnasium(contract.observation_space)
        self.single_action_space = to_gymnasium(contract.action_space)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(  # type: ignore[override]  # infos in RLlib's form
        self,
        *,
        seed: int | Sequence[int] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Start new episodes everywhere; lane i of the whole group gets ``seed + i``."""
        seeds = [seed + lane for lane in range(self.num_envs)] if isinstance(seed, int) else seed
        batches = []
        first = 0
        for session in self._sessions:
            own = seeds[first : first + session.num_lanes] if seeds else ()
            batches.append(session.reset(own, options))
            first += session.num_lanes
        observation, *_, infos = self._join(batches)
        return observation, infos

    def step(self, actions: Any) -> StepTuple:  # type: ignore[override]  # infos in RLlib's form
        """Apply one action a lane.

        Raises:
            ConformanceError: ``actions`` has the wrong structure or dtype; nothing was sent.
            RemoteEnvError: An environment raised or timed out; the group is good for nothing
                but ``close`` then.
            EndpointError: A session broke; likewise.
        """
        columns = coerce_batch(self._contract.action_space, actions, self.num_envs)
        widths = [session.num_lanes for session in self._sessions]
        for session, own in zip(self._sessions, split(columns, widths), strict=True):
            session.send(own)
        return self._join([session.receive() for session in self._sessions])

    def close_extras(self, **_kwargs: Any) -> None:
        """End the sessions; ``close`` calls this."""
        for session in self._sessions:
            session.close()

    def _join(self, batches: Sequence[LaneBatch]) -> StepTuple:
        columns = concatenate([batch.observation for batch in batches])
        return (
            unflatten(self._contract.observation_space, columns),
            np.concatenate([batch.rewards for batch in batches]),
            np.concatenate([batch.terminated for batch in batches]),
            np.concatenate([batch.truncated for batch in batches]),
            [info for batch in batches for info in batch.infos],
        )
