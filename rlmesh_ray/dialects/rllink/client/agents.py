"""Agents for a simulator's loop, with the policy in this process or at the server."""

import math
import uuid
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.dialects.rllink.client.rllink_client import RLlinkClient
from rlmesh_ray.dialects.rllink.wire import messages as m
from rlmesh_ray.errors import ConfigurationError, LocalProtocolError
from rlmesh_ray.models.onnx.action_draws import KINDS, ActionDraws
from rlmesh_ray.models.onnx.onnx_session import OnnxSession, check_model
from rlmesh_ray.spaces.spec import DTYPES

Array = NDArray[Any]
_DTYPES = {name: np.dtype(name) for name in DTYPES}


def action_dtype(config: m.SetConfig) -> np.dtype[Any]:
    """Return the dtype of the actions.

    Raises:
        ConfigurationError: The server does not say what actions are, as Ray's own does not.
    """
    try:
        # np.dtype() accepts others, such as one of a gigabyte per element.
        dtype: np.dtype[Any] = _DTYPES[config.extras["action_space"]["dtype"]]
    except (KeyError, TypeError) as error:
        raise ConfigurationError(
            "the server does not say what actions are; agents need a runner of rlmesh_ray"
        ) from error
    return dtype


class OnnxPolicy:
    """Acts as RLlib's module would: the same distribution, another generator.

    Args:
        config: What the server says of sampling.
        seed: For the draws.

    Raises:
        ConfigurationError: onnxruntime is missing, or the server does not say how to draw.
    """

    def __init__(self, config: m.SetConfig, seed: int | None = None) -> None:
        self._told = config.extras
        kind = self._told.get("action_distribution")
        if kind not in KINDS:
            raise ConfigurationError(
                f"the server draws actions from {kind!r}; this client knows {', '.join(KINDS)}"
            )
        self._draws = ActionDraws(kind, seed)
        self._space: dict[str, Any] = self._told["action_space"]
        self._obs_dtype = np.dtype(self._told["observation_space"]["dtype"])
        self._session: OnnxSession | None = None
        self.weights_seq_no = -1
        """Of the weights that act; -1 before the first."""

    def load(self, state: m.SetState) -> None:
        """Act with other weights from now on.

        Raises:
            ConfigurationError: The server's model would read this machine's files.
            MissingPackageError: onnx or onnxruntime is missing.
            PolicyError: It is no model.
        """
        check_model(state.onnx, "the server's model")
        self._session = OnnxSession(state.onnx)
        self._draws.epsilon = float(state.extras.get("epsilon", 0.0))
        self.weights_seq_no = state.weights_seq_no

    def distribution_inputs(self, obs: Array) -> Array:
        """Return what actions are drawn from, (n, k), for observations, (n, *shape)."""
        assert self._session is not None, "a policy acts once it has weights"
        outputs: Array = self._session.run(np.asarray(obs, self._obs_dtype))[0]
        return outputs

    def act(self, obs: Array) -> Array:
        """Return actions as they were drawn, (n, *shape): these go into episodes.

        Args:
            obs: (n, *shape).
        """
        inputs = self.distribution_inputs(obs).astype(np.float64)
        actions, _ = self._draws.draw(inputs, explore=self._told["explore"])
        shape = self._space["shape"] if self._space["kind"] == "box" else actions.shape[1:]
        return actions.reshape(len(actions), *shape).astype(self._space["dtype"])

    def for_environment(self, action: Array) -> Array:
        """Return an action as the environment takes it: scaled or clipped, as RLlib would."""
        if self._space["kind"] == "discrete":
            return action
        low, high = self._bound("low", -math.inf), self._bound("high", math.inf)
        if self._told["normalize_actions"]:
            if not (np.isfinite(low).all() and np.isfinite(high).all()):
                return action
            action = low + (action + 1.0) * (high - low) / 2.0
        elif not self._told["clip_actions"]:
            return action
        return np.clip(action, low, high).astype(self._space["dtype"])

    def _bound(self, name: str, none: float) -> Array:
        told = self._space[name]
        values = np.array([none if each is None else each for each in np.ravel(told)], float)
        return (
            np.broadcast_to(values, self._space["shape"])
            if values.size == 1
            else values.reshape(self._space["shape"])
        )


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
