"""An environment whose observations prove what was done to it: a hash chain over its actions.

Two observations and the action between them show whether they belong together: the
later one holds a hash over the former one's and the action. So a step that was lost, done twice,
answered with another one's answer, or stitched to another episode shows in the next observation.
"""

import hashlib
import os
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

NUM_ACTIONS = 16
LONGEST_EPISODE = 64
_WORD_BITS = 24
"""Of a number in an observation: what a float32 holds exactly."""
_WORD_MASK = (1 << _WORD_BITS) - 1
_NUM_WORDS = 6
_MEAN_EPISODE = 24
_FIRST_MARK = 1 << 20
"""Above all actions."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a lane is: what an observation says."""

    incarnation: int
    """Of the environment: drawn anew whenever one is created."""
    episode: int
    """Counts up in each incarnation, from 1 on."""
    step: int
    digest: int

    @classmethod
    def first(cls, incarnation: int, episode: int) -> Self:
        """Return where an episode begins."""
        return cls(incarnation, episode, 0, _digest(incarnation, episode))

    def after(self, action: int) -> "Position":
        """Return where ``action`` leads."""
        digest = _digest(self.digest, action)
        return Position(self.incarnation, self.episode, self.step + 1, digest)

    def marked(self, number: int) -> "Position":
        """Return where a mark leads, which is no step."""
        digest = _digest(self.digest, _FIRST_MARK + number)
        return Position(self.incarnation, self.episode, self.step, digest)

    @property
    def is_terminated(self) -> bool:
        """Whether the episode ends here by itself."""
        return self.step > 0 and self.digest % _MEAN_EPISODE == 0

    @property
    def is_truncated(self) -> bool:
        """Whether its time is over."""
        return self.step >= LONGEST_EPISODE and not self.is_terminated

    @property
    def reward(self) -> float:
        """For the step that led here."""
        return float(self.digest & _WORD_MASK)

    def observation(self) -> NDArray[np.float32]:
        """Return the observation."""
        words = (*_words(self.incarnation), self.episode, self.step, *_words(self.digest))
        return np.array(words, np.float32)

    @classmethod
    def read(cls, observation: Any) -> Self:
        """Return what an observation says."""
        high, low, episode, step, *digest = (int(word) for word in observation)
        return cls(_joined(high, low), episode, step, _joined(*digest))


class HashChain(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Goes from position to position."""

    observation_space = spaces.Box(0, _WORD_MASK + 1, (_NUM_WORDS,), np.float32)
    action_space = spaces.Discrete(NUM_ACTIONS)

    def __init__(self) -> None:
        self._incarnation = int.from_bytes(os.urandom(2 * _WORD_BITS // 8))
        self._position = Position.first(self._incarnation, 0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._position = Position.first(self._incarnation, self._position.episode + 1)
        return self._position.observation(), {}

    def step(self, action: Any) -> Any:
        self._position = position = self._position.after(int(action))
        ends = position.is_terminated, position.is_truncated
        return position.observation(), position.reward, *ends, {}


class Pair:
    """Two agents that see the same chain, whose links are both agents' actions."""

    possible_agents = ("left", "right")
    observation_spaces: ClassVar[Any] = dict.fromkeys(possible_agents, HashChain.observation_space)
    action_spaces: ClassVar[Any] = dict.fromkeys(possible_agents, HashChain.action_space)

    def __init__(self) -> None:
        self._chain = HashChain()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        observation, _ = self._chain.reset(seed=seed)
        return dict.fromkeys(self.possible_agents, observation), {}

    def step(self, actions: Any) -> Any:
        action = joint_action(actions["left"], actions["right"])
        observation, reward, terminated, truncated, _ = self._chain.step(action)
        return (
            dict.fromkeys(self.possible_agents, observation),
            dict.fromkeys(self.possible_agents, reward),
            {"__all__": terminated},
            {"__all__": truncated},
            {},
        )

    def close(self) -> None:
        pass


def joint_action(left: Any, right: Any) -> int:
    """Return what both agents' actions are for their chain."""
    return int(left) * NUM_ACTIONS + int(right)


def action_at(position: Position) -> int:
    """Return what the served policy does there."""
    return position.digest % NUM_ACTIONS


def act(observations: Any) -> Any:
    """The policy that is served: a batch of observations in, a batch of actions out."""
    return np.array([action_at(Position.read(each)) for each in observations])


def _digest(*numbers: int) -> int:
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=2 * _WORD_BITS // 8).digest())


def _words(number: int) -> tuple[int, int]:
    return number >> _WORD_BITS, number & _WORD_MASK


def _joined(high: int, low: int) -> int:
    return high << _WORD_BITS | low
