"""Simulators in threads, which connect to a runner and go on until it hangs up."""

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from rlmesh_ray.dialects.rllink.client import LocalAgent, RemoteAgent, RLlinkClient
from rlmesh_ray.errors import RlmeshError


class Aim(gymnasium.Env[Any, Any]):
    """One step an episode: the action shall be twice the observation."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Box(-2, 2, (1,))
    _aim: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Set another aim."""
        super().reset(options=options)  # the same seed would set the same
        self._aim = self.np_random.uniform(-1, 1, 1).astype("f4")
        return self._aim, {}

    def step(self, action: Any) -> Any:
        """Tell how far off it was."""
        off = float(action[0] - 2 * self._aim[0])
        return self._aim, -(off**2), True, False, {}


class Repeat(gymnasium.Env[Any, Any]):
    """Eight steps an episode, each of them worth 1 if the action is the number that was shown."""

    observation_space = gymnasium.spaces.Box(0, 1, (4,))
    action_space = gymnasium.spaces.Discrete(4)
    _shown = 0
    _num_steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Show the first number."""
        super().reset(options=options)  # the same seed would show the same
        self._num_steps = 0
        return self._show(), {}

    def step(self, action: Any) -> Any:
        """Compare, and show another number."""
        reward = float(action == self._shown)
        self._num_steps += 1
        return self._show(), reward, self._num_steps == 8, False, {}

    def _show(self) -> Any:
        self._shown = int(self.np_random.integers(4))
        return np.eye(4, dtype="f4")[self._shown]


gymnasium.register("RLlinkAim-v0", "tests.ray.rllink_simulators:Aim")
gymnasium.register("RLlinkRepeat-v0", "tests.ray.rllink_simulators:Repeat")


Agent = LocalAgent | RemoteAgent


def local(client: RLlinkClient, seed: int) -> Agent:
    """Act with a copy of the policy."""
    return LocalAgent(client, seed=seed)


def asking(client: RLlinkClient, _seed: int) -> Agent:
    """Ask for each action."""
    return RemoteAgent(client)


class Simulators:
    """A number of them; ``stop`` waits until they have gone."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._clients: list[RLlinkClient] = []

    def start(
        self,
        address: str,
        make: Callable[[RLlinkClient, int], Agent] = local,
        *,
        env: str = "CartPole-v1",
        **options: Any,
    ) -> None:
        """Connect one more."""
        client = RLlinkClient(address, **options)
        seed = len(self._threads)
        thread = threading.Thread(
            target=self._run, args=(client, make, gymnasium.make(env), seed), daemon=True
        )
        self._clients.append(client)
        self._threads.append(thread)
        thread.start()

    def hang_up(self) -> None:
        """Let all connections break, in the middle of a request."""
        for client in self._clients:
            with contextlib.suppress(OSError):
                client._connection().shutdown(socket.SHUT_RDWR)
        self.stop()

    def stop(self) -> None:
        """End them; after the runner has been stopped, or they would wait for it."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()
        for client in self._clients:
            client.close()
        self._threads.clear()
        self._clients.clear()

    def _run(
        self,
        client: RLlinkClient,
        make: Callable[[RLlinkClient, int], Agent],
        env: gymnasium.Env[Any, Any],
        seed: int,
    ) -> None:
        try:
            agent = make(client, seed)
            while not self._stopping.is_set():
                _play(agent, env, seed)
        except RlmeshError as error:  # the runner has hung up, or has said why it does
            self.errors.append(error)
        finally:
            env.close()


def _play(agent: Agent, env: gymnasium.Env[Any, Any], seed: int) -> None:
    obs, _ = env.reset(seed=seed)
    action = agent.begin(obs)
    while True:
        assert env.action_space.contains(action if action.shape else action[()]), action
        obs, reward, terminated, truncated, _ = env.step(action if action.shape else int(action))
        if terminated or truncated:
            agent.end(obs, float(reward), is_truncated=truncated and not terminated)
            return
        action = agent.step(obs, float(reward))
