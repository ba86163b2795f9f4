"""The simulator's side of RLlink: its client, and agents for a simulator's loop.

A client needs NumPy, and msgpack for Ray's dialect; neither Ray nor torch, gRPC or Gymnasium.
"""

import math
import os
import socket
import uuid
from collections.abc import Sequence
from typing import Any, Self, TypeVar

import numpy as np

from rlmesh_ray.auth.client_tls import ClientTlsSource, resolve_client_tls
from rlmesh_ray.auth.token_file import TokenSource, client_token_of
from rlmesh_ray.client.fork_guard import forked
from rlmesh_ray.dialects.rllink import wire as m
from rlmesh_ray.dialects.rllink.wire import (
    HEADER_BYTES,
    JSON,
    RAY,
    Array,
    Encoding,
    body_bytes,
    framed,
)
from rlmesh_ray.errors import (
    AddressError,
    CodecError,
    ConfigurationError,
    EndpointClosedError,
    EndpointLostError,
    EndpointTimeoutError,
    EndpointUnreachableError,
    LocalProtocolError,
    RemoteError,
    RemoteProtocolError,
)
from rlmesh_ray.models.onnx.action_draws import KINDS, ActionDraws
from rlmesh_ray.protocol.address import parse_address
from rlmesh_ray.spaces.spec import DTYPES
from rlmesh_ray.transport.tcp import enable_keepalive

__all__ = ["JSON", "RAY", "LocalAgent", "OnnxPolicy", "RLlinkClient", "RemoteAgent"]

ReplyT = TypeVar("ReplyT", bound=m.Reply)
_DTYPES = {name: np.dtype(name) for name in DTYPES}


class RLlinkClient:
    """A connection to the training. Usable as a context manager.

    On-policy, ``exchange`` answers when the learner has new weights, which may take minutes. A
    connection that has failed is of no more use: make another one.

    Args:
        address: ``HOST:PORT``.
        token: What the port wants to see, or the file in which it stands.
        tls: Files for TLS; None for plain text.
        encoding: ``JSON``, or ``RAY`` for Ray's own servers.
        connect_timeout_s: How long to wait for the connection, and then for the first answer.
        timeout_s: How long to wait for an answer; None: as long as it takes.

    Raises:
        AddressError: ``address`` is malformed.
        ConfigurationError: A file cannot be used.
        EndpointError: Nothing listens there, or it does not speak RLlink.
        RemoteError: The token is wrong.
    """

    def __init__(
        self,
        address: str,
        *,
        token: TokenSource | None = None,
        tls: ClientTlsSource | None = None,
        encoding: Encoding = JSON,
        connect_timeout_s: float = 10.0,
        timeout_s: float | None = None,
    ) -> None:
        where = parse_address(address)
        if where.path:
            raise AddressError(f"{address}: RLlink is spoken over TCP; give HOST:PORT")
        self._address = str(where)
        self._pid = os.getpid()
        self._encoding = encoding
        shown = None if token is None else client_token_of(token)
        files = resolve_client_tls(tls)
        context = None if files is None else files.context()
        try:
            line = socket.create_connection((where.host, where.port), connect_timeout_s)
        except OSError as error:
            raise EndpointUnreachableError(
                f"nothing listens for simulators ({error}); start the training first",
                self._address,
            ) from error
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        enable_keepalive(line)  # else a lost machine would never be noticed
        self._socket: socket.socket | None = line
        try:
            if context is not None:
                self._socket = context.wrap_socket(line, server_hostname=where.host)
            self._ask(m.Ping(shown), m.Pong)
            self._socket.settimeout(timeout_s)
        except EndpointLostError as error:
            self.close()
            raise EndpointLostError(
                f"the port has ended the connection at once ({error.message}); it may be full, or "
                "speak TLS (tls=…) and want a certificate that its authority has signed",
                self._address,
            ) from error
        except OSError as error:
            self.close()
            raise EndpointUnreachableError(
                f"something answers there, but TLS with it fails ({error}); check the authority "
                "and the address, and whether the port speaks TLS",
                self._address,
            ) from error
        except BaseException:
            self.close()
            raise

    def get_config(self) -> m.SetConfig:
        """Ask how to sample. A pickled config of Ray's servers stays bytes.

        Raises:
            EndpointError: The connection has failed.
        """
        return self._ask(m.GetConfig(), m.SetConfig)

    def get_state(self) -> m.SetState:
        """Ask for the present weights; waits until there are any.

        Raises:
            EndpointError: The connection has failed.
            RemoteError: They cannot be had in this dialect.
        """
        return self._ask(m.GetState(), m.SetState)

    def send(self, chunks: Sequence[m.Chunk], weights_seq_no: int | None = None) -> None:
        """Send episodes, without an answer.

        Args:
            chunks: Of one step at least each. One that continues another has the same
                ``episode_id``, or begins with the observation that the other has ended with.
            weights_seq_no: Of the weights that have acted.

        Raises:
            CodecError: Something in them cannot travel; nothing was sent.
            EndpointError: The connection has failed.
            RemoteError: The server has refused something that was sent before.
        """
        self._send(m.Episodes(tuple(chunks), False, weights_seq_no))

    def exchange(self, chunks: Sequence[m.Chunk], weights_seq_no: int | None = None) -> m.SetState:
        """Send episodes, and wait for the weights to go on with.

        Args:
            chunks: As of ``send``.
            weights_seq_no: Likewise.

        Raises:
            EndpointError: The connection has failed.
            RemoteError: The samples do not fit the spaces.
        """
        return self._ask(m.Episodes(tuple(chunks), True, weights_seq_no), m.SetState)

    def start_episode(self, episode_id: str | None = None) -> str:
        """Begin an episode whose actions are asked for one by one; return its id.

        Raises:
            EndpointError: The connection has failed.
            RemoteError: There is such an episode already.
        """
        return self._ask(m.StartEpisode(episode_id), m.EpisodeStarted).episode_id

    def get_action(self, episode_id: str, obs: m.Array, reward: float = 0.0) -> m.Array:
        """Return the next action, within the bounds of the action space.

        Args:
            episode_id: Of an episode that has been started.
            obs: What the last action has led to, or what the episode begins with.
            reward: For the last action.

        Raises:
            EndpointError: The connection has failed.
            RemoteError: There is no such episode, or ``obs`` does not fit its space.
        """
        return self._ask(m.GetAction(episode_id, obs, reward), m.Action).action

    def log_returns(self, episode_id: str, reward: float) -> None:
        """Tell of a reward between two actions, without an answer.

        Raises:
            EndpointError: The connection has failed.
            RemoteError: The server has refused something that was sent before.
        """
        self._send(m.LogReturns(episode_id, reward))

    def end_episode(
        self, episode_id: str, obs: m.Array, reward: float = 0.0, *, is_truncated: bool = False
    ) -> None:
        """End an episode that was started, without an answer.

        Args:
            episode_id: Its id.
            obs: What the last action has led to.
            reward: For it.
            is_truncated: Whether a limit has cut it off.

        Raises:
            EndpointError: The connection has failed.
            RemoteError: The server has refused something that was sent before.
        """
        self._send(m.EndEpisode(episode_id, obs, reward, is_truncated))

    def close(self) -> None:
        """Hang up. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: m.Request, expected: type[ReplyT]) -> ReplyT:
        self._send(request)
        reply = self._receive()
        if not isinstance(reply, expected):
            self.close()
            raise RemoteProtocolError(
                f"{type(reply).__name__} came where {expected.__name__} was expected"
            )
        return reply

    def _receive(self) -> m.Reply:
        try:
            reply = self._encoding.parse_reply(self._read(body_bytes(self._read(HEADER_BYTES))))
        except CodecError as error:
            self.close()
            raise EndpointLostError(f"the answer cannot be read: {error}", self._address) from error
        if isinstance(reply, m.Failed):
            self.close()
            raise RemoteError("ERROR", reply.message, False)
        return reply

    def _send(self, request: m.Request) -> None:
        frame = framed(self._encoding.pack_request(request))
        try:
            self._connection().sendall(frame)
        except (BrokenPipeError, ConnectionResetError) as error:
            self._receive()  # raises; the server's reason, if it has given one
            raise self._failed(error) from error
        except OSError as error:
            raise self._failed(error) from error

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view, filled = memoryview(data), 0
        while filled < size:
            try:
                count = self._connection().recv_into(view[filled:])
            except OSError as error:
                raise self._failed(error) from error
            if not count:
                raise self._failed(ConnectionError("it has been closed"))
            filled += count
        return bytes(data)

    def _connection(self) -> socket.socket:
        if os.getpid() != self._pid:
            raise forked(self._pid, self._address)
        if self._socket is None:
            raise EndpointClosedError("the connection has been closed", self._address)
        return self._socket

    def _failed(self, error: OSError) -> EndpointLostError | EndpointTimeoutError:
        self.close()
        if isinstance(error, TimeoutError):
            return EndpointTimeoutError("no answer in time", self._address)
        return EndpointLostError(f"the connection has failed: {error}", self._address)


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
        self._session: Any = None
        self.weights_seq_no = -1
        """Of the weights that act; -1 before the first."""

    def load(self, state: m.SetState) -> None:
        """Act with other weights from now on.

        Raises:
            ConfigurationError: The server's model would read this machine's files.
            MissingPackageError: onnx or onnxruntime is missing.
            PolicyError: It is no model.
        """
        # Before it has a model, a simulator loads neither onnxruntime nor Gymnasium.
        from rlmesh_ray.models.onnx.onnx_models import OnnxSession, check_model

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
        told = client.get_config().extras
        try:
            # np.dtype() accepts others, such as one of a gigabyte per element.
            self._dtype = _DTYPES[told["action_space"]["dtype"]]
        except (KeyError, TypeError) as error:
            raise ConfigurationError(
                "the server does not say what actions are; agents need a runner of rlmesh_ray"
            ) from error
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
