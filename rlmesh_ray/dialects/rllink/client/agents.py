"""Agents for a simulator's loop, with the policy in this process or at the server."""

import uuid
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.dialects.rllink.client.onnx_policy import OnnxPolicy, action_dtype
from rlmesh_ray.dialects.rllink.client.rllink_client import RLlinkClient
from rlmesh_ray.dialects.rllink.wire import messages as m
from rlmesh_ray.errors import LocalProtocolError

Array = NDArray[Any]


class LocalAgent:
    """Acts with a copy of the policy, and sends what has come of it.

    A call may take as long as learning takes: on-policy, the simulator waits for new weights when
    it has sent its samples.

    Args:
        client: In JSON; used by this agent alone.
        seed: For the draws.

    Raises:
        ConfigurationError: onnxruntime is missing, or the server does not say how to draw.
        EndpointError: The connection has failed.
        RemoteError: The server has no model to give.
    """

    def __init__(self, client: RLlinkClient, *, seed: int | None = None) -> None:
        self._client = client
        self._config = client.get_config()
        self._policy = OnnxPolicy(self._config, seed)
        self._policy.load(client.get_state())
        self._episode_id = ""
        self._obs: list[Array] = []
        self._actions: list[Array] = []
        self._rewards: list[float] = []
        self._complete: list[m.Chunk] = []

    @property
    def weights_seq_no(self) -> int:
        """Of the weights that act now."""
        return self._policy.weights_seq_no

    def begin(self, obs: Array) -> Array:
        """Begin an episode with its first observation; return the first action.

        Raises:
            LocalProtocolError: The last one has not ended.
        """
        if self._obs:
            raise LocalProtocolError("an episode is running: end() it first")
        self._episode_id = uuid.uuid4().hex
        self._obs.append(np.array(obs))
        return self._act()

    def step(self, obs: Array, reward: float) -> Array:
        """Tell what the last action has led to; return the next one.

        Raises:
            EndpointError: The connection has failed.
            LocalProtocolError: No episode is running.
        """
        self._learn(obs, reward)
        self._send_if_enough()
        return self._act()

    def end(self, obs: Array, reward: float, *, is_truncated: bool = False) -> None:
        """Tell what the last action has led to, which is the end of the episode.

        Raises:
            EndpointError: The connection has failed.
            LocalProtocolError: No episode is running.
        """
        self._learn(obs, reward)
        self._cut(is_terminated=not is_truncated, is_truncated=is_truncated)
        self._obs.clear()
        self._send_if_enough()

    def _act(self) -> Array:
        action = self._policy.act(self._obs[-1][None])[0]
        self._actions.append(action.copy())
        return self._policy.for_environment(action)

    def _learn(self, obs: Array, reward: float) -> None:
        if not self._obs:
            raise LocalProtocolError("no episode is running: begin() one first")
        self._obs.append(np.array(obs))  # a copy: simulators may write into theirs again
        self._rewards.append(float(reward))

    def _send_if_enough(self) -> None:
        num_steps = len(self._rewards) + sum(map(len, self._complete))
        if num_steps < self._config.env_steps_per_sample:
            return
        if self._rewards:
            self._cut(is_terminated=False, is_truncated=False)
        chunks, self._complete = self._complete, []
        self._policy.load(self._client.exchange(chunks, self._policy.weights_seq_no))

    def _cut(self, *, is_terminated: bool, is_truncated: bool) -> None:
        self._complete.append(
            m.Chunk(
                np.stack(self._obs),
                np.stack(self._actions),
                np.array(self._rewards, np.float64),
                is_terminated,
                is_truncated,
                self._episode_id,
            )
        )
        del self._obs[:-1]
        self._actions.clear()
        self._rewards.clear()


class RemoteAgent:
    """Asks the server for each action: for simulators that cannot run a model.

    Args:
        client: In JSON. Several agents, one episode each, may share one; not several threads.

    Raises:
        ConfigurationError: The server does not say what actions are.
        EndpointError: The connection has failed.
    """

    def __init__(self, client: RLlinkClient) -> None:
        self._client = client
        self._dtype = action_dtype(client.get_config())
        self._episode_id: str | None = None

    def begin(self, obs: Array) -> Array:
        """Begin an episode with its first observation; return the first action.

        Raises:
            EndpointError: The connection has failed.
            LocalProtocolError: The last one has not ended.
            RemoteError: The observation does not fit its space.
        """
        if self._episode_id is not None:
            raise LocalProtocolError("an episode is running: end() it first")
        self._episode_id = self._client.start_episode()
        return self._client.get_action(self._episode_id, np.asarray(obs)).astype(self._dtype)

    def step(self, obs: Array, reward: float) -> Array:
        """Tell what the last action has led to; return the next one.

        Raises:
            EndpointError: The connection has failed.
            LocalProtocolError: No episode is running.
            RemoteError: The observation does not fit its space.
        """
        action = self._client.get_action(self._running(), np.asarray(obs), float(reward))
        return action.astype(self._dtype)

    def end(self, obs: Array, reward: float, *, is_truncated: bool = False) -> None:
        """Tell what the last action has led to, which is the end of the episode.

        Raises:
            EndpointError: The connection has failed.
            LocalProtocolError: No episode is running.
        """
        self._client.end_episode(
            self._running(), np.asarray(obs), float(reward), is_truncated=is_truncated
        )
        self._episode_id = None

    def _running(self) -> str:
        if self._episode_id is None:
            raise LocalProtocolError("no episode is running: begin() one first")
        return self._episode_id
