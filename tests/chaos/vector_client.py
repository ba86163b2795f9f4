"""RemoteVectorEnvs as clients of trials: the history gets what they see."""

import threading
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from rlmesh_ray import ConnectOptions, RemoteVectorEnv, TokenFile
from rlmesh_ray.errors import EndpointError, RemoteEnvError
from tests.chaos.chain_variants import read_picture
from tests.chaos.hash_chain import NUM_ACTIONS
from tests.chaos.history import History

TIMEOUT_S = 2.0
"""Of the clients' steps."""
LIMIT_S = 60.0
"""By then a client must have been answered again."""
NUM_LANES = 2
_NUM_STEPS = 16
"""Of a client, between two looks whether it is to stop."""
_CALLS_PER_STEP = 0.3
_MOST_MARKS = 1000
_PAUSE_S = 0.05
"""Of a client, where the endpoint does not answer."""


class Client(Protocol):
    """Who steps hash chains, and tells a history what it sees."""

    def advance(self) -> bool:
        """Take some steps, or reset what was lost; return whether that was answered."""

    def close(self) -> None:
        """Leave the endpoint."""


class VectorClient:
    """A RemoteVectorEnv that is opened again where its session breaks.

    Args:
        address: Of the endpoint.
        history: Gets what is seen.
        seed: Of the actions.
        token: What it shows.
        name: What the names of its lanes begin with.
    """

    def __init__(
        self,
        address: str,
        history: History,
        *,
        seed: int,
        token: TokenFile | None = None,
        name: str = "",
    ) -> None:
        self._address, self._history = address, history
        self._token = token
        self._name = name
        self.failures: list[str] = []
        """What went wrong, and was survived."""
        self._actions = np.random.default_rng(seed)
        self._env: RemoteVectorEnv | None = None
        self._running: set[int] = set()
        """Lanes with an episode."""
        self._must_reset = True

    def advance(self) -> bool:
        """Take some steps; after a failure, reset all lanes, of another session perhaps."""
        try:
            self._advance()
        except RemoteEnvError as error:
            self._lose(error)
            if not error.is_recoverable:
                self.close()
            return False
        except EndpointError as error:
            self._lose(error)
            self.close()
            threading.Event().wait(_PAUSE_S)
            return False
        return True

    def close(self) -> None:
        """End the session, if there is one."""
        if self._env is not None:
            self._env.close()
        self._env, self._must_reset = None, True

    def _advance(self) -> None:
        if self._env is None:
            self._env = RemoteVectorEnv(
                ConnectOptions(self._address, self._token, timeout_s=LIMIT_S),
                step_timeout_s=TIMEOUT_S,
                reset_timeout_s=TIMEOUT_S,
            )
        if self._must_reset:
            observations, _ = self._env.reset()
            self._must_reset = False
            for lane, observation in enumerate(observations):
                self._begin(lane, observation)
        for _ in range(_NUM_STEPS):
            self._step(self._env)

    def _step(self, env: RemoteVectorEnv) -> None:
        actions = self._actions.integers(NUM_ACTIONS, size=NUM_LANES)
        observations, rewards, terminated, truncated, _ = env.step(actions)
        for lane, observation in enumerate(observations):
            if lane not in self._running:  # it has reset itself
                self._begin(lane, observation)
                continue
            self._history.stepped(
                self._lane(lane),
                actions[lane],
                observation,
                rewards[lane],
                terminated=terminated[lane],
                truncated=truncated[lane],
            )
            if terminated[lane] or truncated[lane]:
                self._running.discard(lane)

    def _begin(self, lane: int, observation: Any) -> None:
        self._history.began(self._lane(lane), observation)
        self._running.add(lane)

    def _lane(self, lane: int) -> str:
        return f"{self._name}{lane}"

    def _lose(self, error: Exception) -> None:
        self.failures.append(str(error))
        for lane in sorted(self._running):
            self._history.lost(self._lane(lane), str(error))
        self._running.clear()
        self._must_reset = True


class VisitingClient(VectorClient):
    """Opens a session for each ``advance``, and ends it."""

    def advance(self) -> bool:
        """Take some steps in a new session."""
        is_answered = super().advance()
        self._running.clear()
        self.close()
        return is_answered


class CallingClient(VectorClient):
    """Looks at the lanes of a ``CalledChain`` and marks them between steps, by calls and Render."""

    def _step(self, env: RemoteVectorEnv) -> None:
        super()._step(env)
        kind = self._actions.random() / _CALLS_PER_STEP
        if kind < 1 / 3:
            self._see(env.call("look"))
        elif kind < 2 / 3:
            self._see(map(read_picture, env.render() or ()))
        elif kind < 1:
            number = int(self._actions.integers(_MOST_MARKS))
            for lane, observation in enumerate(env.call("mark", number)):
                if lane in self._running:
                    self._history.marked(self._lane(lane), number, observation)

    def _see(self, observations: Iterable[Any]) -> None:
        for lane, observation in enumerate(observations):
            if lane in self._running:
                self._history.continued(self._lane(lane), observation)
