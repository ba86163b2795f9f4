"""Construction of RLlib's episodes from arrays, without the checks of RLlib's constructor."""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer

_REWARDS = gymnasium.spaces.Box(-np.inf, np.inf, (), np.float32)
"""The space that RLlib's episodes give their rewards."""


class EpisodeFactory:
    """Makes episodes in the state in which RLlib's ``to_numpy`` leaves them.

    RLlib's own constructor determines the structure of each buffer's space several times, and
    checks every length: half of the cost of an episode of twenty steps. So it makes one episode,
    and all others are copies of that pattern with other contents.

    Args:
        observation_space: Observation space of one lane.
        action_space: Action space of one lane.
    """

    def __init__(
        self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
    ) -> None:
        # RLlib requires one observation more than actions.
        pattern = SingleAgentEpisode(
            observations=InfiniteLookbackBuffer(np.zeros(2)),
            observation_space=observation_space,
            infos=InfiniteLookbackBuffer([{}, {}]),
            actions=InfiniteLookbackBuffer(np.zeros(1)),
            action_space=action_space,
            rewards=InfiniteLookbackBuffer(np.zeros(1), 0, _REWARDS),
        )
        self._slots = {
            name: getattr(pattern, name)
            for kind in type(pattern).__mro__
            for name in getattr(kind, "__slots__", ())
        }
        self._observations = vars(pattern.observations)
        self._infos = vars(pattern.infos)
        self._actions = vars(pattern.actions)
        self._rewards = vars(pattern.rewards)
        self._extra = vars(InfiniteLookbackBuffer(np.zeros(1)))

    def make(
        self,
        id_: str,
        *,
        observations: NDArray[Any],
        infos: list[dict[str, Any]],
        actions: NDArray[Any],
        rewards: NDArray[np.float64],
        extras: Mapping[str, NDArray[Any]],
        lookback: int,
        t_started: int,
    ) -> SingleAgentEpisode:
        """Return an episode of at least one step; it keeps the arrays as they are.

        Args:
            id_: Id of the episode.
            observations: The observations before each step and after the last one.
            infos: Likewise.
            actions: One row for each step.
            rewards: One for each step.
            extras: The module's other outputs; one row for each step.
            lookback: How many of the steps belong to the former chunk.
            t_started: Steps of the episode before this chunk.
        """
        episode = object.__new__(SingleAgentEpisode)
        slots = {
            **self._slots,
            "id_": id_,
            "observations": _buffer(self._observations, observations, lookback),
            "infos": _buffer(self._infos, infos, lookback),
            "actions": _buffer(self._actions, actions, lookback),
            "rewards": _buffer(self._rewards, rewards, lookback),
            "extra_model_outputs": {
                name: _buffer(self._extra, column, lookback) for name, column in extras.items()
            },
            "t_started": t_started,
            "t": t_started + len(rewards) - lookback,
            "_custom_data": {},
        }
        for name, value in slots.items():
            setattr(episode, name, value)
        return episode


def _buffer(pattern: dict[str, Any], data: Any, lookback: int) -> InfiniteLookbackBuffer:
    buffer = object.__new__(InfiniteLookbackBuffer)
    buffer.__dict__ = {**pattern, "data": data, "lookback": lookback}
    return buffer
