"""RLlinkClient: a simulator's client of RLlink, in either encoding; blocking.

Needs NumPy, and msgpack for Ray's dialect; neither Ray nor torch, gRPC or Gymnasium.
"""

import socket
import ssl
from collections.abc import Sequence
from typing import Self, TypeVar

from rlmesh_ray.auth.client_tls import ClientTlsSource, resolve_client_tls
from rlmesh_ray.auth.token_file import TokenSource, client_token_of
from rlmesh_ray.client.fork_guard import ForkGuard
from rlmesh_ray.dialects.rllink.wire import messages as m
from rlmesh_ray.dialects.rllink.wire.encodings import (
    HEADER_BYTES,
    JSON,
    RAY,
    Encoding,
    body_bytes,
    framed,
)
from rlmesh_ray.errors import (
    AddressError,
    CodecError,
    EndpointClosedError,
    EndpointLostError,
    EndpointTimeoutError,
    EndpointUnreachableError,
    RemoteError,
    RemoteProtocolError,
)
from rlmesh_ray.protocol.address import parse_address
from rlmesh_ray.transport.tcp import enable_keepalive

__all__ = ["JSON", "RAY", "RLlinkClient"]

ReplyT = TypeVar("ReplyT", bound=m.Reply)


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
        self._process = ForkGuard(self._address)
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
        if context is not None:
            self._socket = _encrypted(line, context, where.host, self._address)
        try:
            self._ask(m.Ping(shown), m.Pong)
            self._socket.settimeout(timeout_s)
        except EndpointLostError as error:
            self.close()
            raise EndpointLostError(
                f"the port has ended the connection at once ({error.message}); it may be full, or "
                "speak TLS (tls=…) and want a certificate that its authority has signed",
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
        if fault := m.request_fault(request):
            raise CodecError(f"{type(request).__name__} cannot be sent: {fault}")
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
        self._process.require()
        if self._socket is None:
            raise EndpointClosedError("the connection has been closed", self._address)
        return self._socket

    def _failed(self, error: OSError) -> EndpointLostError | EndpointTimeoutError:
        self.close()
        if isinstance(error, TimeoutError):
            return EndpointTimeoutError("no answer in time", self._address)
        return EndpointLostError(f"the connection has failed: {error}", self._address)


def _encrypted(
    line: socket.socket, context: ssl.SSLContext, host: str, address: str
) -> ssl.SSLSocket:
    try:
        return context.wrap_socket(line, server_hostname=host)
    except OSError as error:
        line.close()
        raise EndpointUnreachableError(
            f"something answers there, but TLS with it fails ({error}); check the authority and "
            "the address, and whether the port speaks TLS",
            address,
        ) from error
