"""Models of the released rlmesh, by name; runs in its virtual environment."""

from typing import Any

import numpy as np
from rlmesh.numpy import Model  # type: ignore[import-not-found]  # of another virtual environment

from tests.peers.rlmesh_released.torques import torques


class Balance(Model):
    """Pushes CartPole's cart towards where the pole falls."""

    def predict(self, observation: Any) -> int:
        return int(observation[2] + observation[3] > 0)

    def predict_batch(self, observations: Any) -> Any:
        return (observations[:, 2] + observations[:, 3] > 0).astype(np.int64)


class Stubborn(Model):
    """Always does the same."""

    def __init__(self, action: int = 0) -> None:
        super().__init__()
        self._action = action

    def predict(self, observation: Any) -> int:
        return self._action

    def predict_batch(self, observations: Any) -> Any:
        return np.full(len(observations), self._action)


class Chunks(Model):
    """Gives four actions at once, and counts the episodes that have ended."""

    native_chunk = 4

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[str] = []

    def predict_chunk(self, observation: Any) -> Any:
        first = int(observation[2] + observation[3] > 0)
        return np.array([first, 1 - first, first, 1 - first])

    def on_episode_end(self, episode_id: str = "") -> None:
        self.ended.append(episode_id)


class Swings(Model):
    """Gives five torques for Pendulum at once."""

    native_chunk = 5

    def predict_chunk(self, observation: Any) -> Any:
        return torques(np.asarray(observation)[np.newaxis])[0]


class Undeclared(Model):
    """Likewise, without saying how many."""

    def predict_chunk(self, observation: Any) -> Any:
        return torques(np.asarray(observation)[np.newaxis])[0]


class Counter(Model):
    """Acts by how often it was asked in the running episode: it remembers."""

    def __init__(self) -> None:
        super().__init__()
        self._asked = 0

    def predict(self, observation: Any) -> int:
        self._asked += 1
        return self._asked % 2

    def on_episode_end(self, episode_id: str = "") -> None:
        self._asked = 0


class Raises(Model):
    """Cannot act."""

    def predict(self, observation: Any) -> int:
        raise RuntimeError("no idea")


MODELS = {
    kind.__name__: kind for kind in (Balance, Chunks, Counter, Raises, Stubborn, Swings, Undeclared)
}
