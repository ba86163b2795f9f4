"""RLlinkServer: the port for external simulators, in either encoding of RLlink.

Each connection has a task of its own. A frame that has begun must be complete in time, and an
answer be received in time. A client that breaks a rule gets an error and is disconnected, without
effect on the others. There is no limit to the time between two frames.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from rlmesh_ray.auth.token_file import ServerToken, TokenRole, TokenStore, token_store
from rlmesh_ray.dialects.rllink import wire as m
from rlmesh_ray.dialects.rllink.wire import (
    HEADER_BYTES,
    JSON,
    MOST_BODY_BYTES,
    Encoding,
    body_bytes,
    encoding_of,
    framed,
)
from rlmesh_ray.errors import (
    AddressError,
    CapacityError,
    ListenError,
    RemoteProtocolError,
    RlmeshError,
)
from rlmesh_ray.grpc_setup import is_fork
from rlmesh_ray.protocol.address import Address
from rlmesh_ray.server.endpoint.bind_policy import (
    TlsSource,
    checked_address,
    listen_arguments,
    resolve_server_tls,
    warn_without_token,
)
from rlmesh_ray.server.endpoint.event_loop import shared_loop
from rlmesh_ray.server.endpoint.gate import require_descriptors
from rlmesh_ray.transport.tcp import enable_keepalive

_LOG = logging.getLogger(__name__)

_STOP_S = 5.0
_LARGE_BYTES = 2**16
"""Larger messages are read in another thread, while the other clients are answered."""
_STRANGER_BYTES = 4096
"""Most bytes of a message before the client has shown the token."""
ImmediateOrLaterReply = m.Reply | Future[m.Reply | None] | None


class ClientSession(Protocol):
    """One client's conversation; called in the serving loop, so it must not block."""

    def receive(self, request: m.Request) -> ImmediateOrLaterReply:
        """Take a request, other than Ping; return its reply, at once or later, or none.

        Until a reply that comes later is there, nothing else of this client's is looked at. It may
        be cancelled, when the client has gone.

        Raises:
            RlmeshError: The request cannot be taken; the client is told and cut off.
        """

    def leave(self) -> None:
        """Forget the client, who has gone."""


Admit = Callable[[str, Encoding], ClientSession]
"""Begins the session of a client, by its address and dialect; called in the serving loop."""


@dataclass(frozen=True, slots=True)
class RLlinkLimits:
    """What a client may ask of the port."""

    max_message_bytes: int = 32 * 2**20
    """Of a message's body; at most what eight digits can say."""
    frame_timeout_s: float = 30.0
    """From a frame's first byte to its last; also for taking an answer, and for the first frame."""
    max_clients: int = 256
    """Clients at a time; further ones are closed at their first message."""
    stranger_timeout_s: float = 10.0
    """How long a connection may take to TLS, and then to show a token where one is wanted."""
    max_strangers: int = 32
    """Connections at a time that have not sent their first message, with a token where one is
    wanted, besides ``max_clients``; when another one comes, the oldest is closed."""


class RLlinkConnection:
    """Talks with one client, in a task of its own.

    Args:
        reader: What comes.
        writer: Where answers go.
        limits: What the client may ask of the port.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: RLlinkLimits
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._limits = limits
        self._encoding: Encoding | None = None
        """That of its first message."""
        host, port, *_ = writer.get_extra_info("peername") or ("an unknown host", 0)
        self.peer = f"{host}:{port}"
        # Else the connection would stay open for ever if the client's machine died.
        with contextlib.suppress(OSError):  # the client has gone already
            enable_keepalive(writer.get_extra_info("socket"))

    async def serve(self, admit: Admit, known: TokenStore | None, seat: Callable[[], bool]) -> None:
        """Talk with the client until either has had enough.

        Args:
            admit: Begins its session.
            known: What the first message must show; None: nothing.
            seat: Called when the first message has come, with the right token where one is wanted;
                returns whether there is a place.
        """
        limits = self._limits
        try:
            if known is None:
                async with asyncio.timeout(limits.frame_timeout_s):
                    body = await self._read(limits.max_message_bytes)
                request = await self._parsed(body)
            else:
                async with asyncio.timeout(limits.stranger_timeout_s):
                    body = await self._read(_STRANGER_BYTES)
                request = await self._parsed(body)
                _require_token(request, known)
            if not seat():
                return
            session = admit(self.peer, self._encoding or JSON)
            try:
                await self._attend(session, request)
            finally:
                session.leave()
        except RlmeshError as error:
            _LOG.warning("%s is cut off: %s", self.peer, error)
            await self._cut_off(str(error))
        except (OSError, EOFError):
            raise
        except Exception:  # noqa: BLE001  # the client gets an error, other connections go on
            _LOG.exception("the session of %s has failed", self.peer)
            await self._cut_off("the training could not answer; its log says why")

    async def _attend(self, session: ClientSession, request: m.Request) -> None:
        while True:
            answer = m.Pong() if isinstance(request, m.Ping) else session.receive(request)
            coming = asyncio.ensure_future(self._read(self._limits.max_message_bytes))
            try:
                if isinstance(answer, Future):
                    answer = await self._awaited(answer, coming)
                if answer is not None:
                    await self._send(answer)
                body = await coming
            finally:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
            request = await self._parsed(body)

    async def _awaited(
        self, answer: Future[m.Reply | None], coming: asyncio.Task[bytes]
    ) -> m.Reply | None:
        waiting = asyncio.wrap_future(answer)
        either: set[asyncio.Future[Any]] = {waiting, coming}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if coming.done() and not waiting.done():
                coming.result()  # raises if the client has gone, or has broken a rule
            return await waiting
        finally:
            waiting.cancel()

    async def _read(self, limit: int) -> bytes:
        begun = await self._reader.readexactly(1)
        try:
            async with asyncio.timeout(self._limits.frame_timeout_s):
                header = begun + await self._reader.readexactly(HEADER_BYTES - 1)
                size = body_bytes(header, min(limit, MOST_BODY_BYTES))
                return await self._reader.readexactly(size)
        except TimeoutError as error:
            raise RemoteProtocolError(
                f"a message was not complete {self._limits.frame_timeout_s:g} s after it began"
            ) from error

    async def _parsed(self, body: bytes) -> m.Request:
        encoding = encoding_of(body)
        if encoding is not (self._encoding or encoding):
            raise RemoteProtocolError("a client must keep to the dialect that it has begun with")
        self._encoding = encoding
        if len(body) > _LARGE_BYTES:
            return await asyncio.to_thread(encoding.parse_request, body)
        return encoding.parse_request(body)

    async def _send(self, reply: m.Reply) -> None:
        self._require_connected()
        self._writer.write(framed((self._encoding or JSON).pack_reply(reply)))
        # Not wait_for: before Python 3.12 it forgets a cancellation that comes with the result.
        async with asyncio.timeout(self._limits.frame_timeout_s):
            await self._writer.drain()

    async def _cut_off(self, reason: str) -> None:
        await self._send(m.Failed(reason))
        self._require_connected()
        if self._writer.can_write_eof():  # not with TLS
            self._writer.write_eof()
        # Else the kernel would throw the answer away with what has not been read.
        async with asyncio.timeout(self._limits.frame_timeout_s):
            while await self._reader.read(2**16):
                pass

    def _require_connected(self) -> None:
        """Raise ConnectionResetError if the connection is broken, on either event loop.

        Writing to it would be a RuntimeError on uvloop, and for asyncio's own loop a warning.
        """
        if self._writer.is_closing():
            raise ConnectionResetError("the connection is broken")


def _require_token(request: m.Request, known: TokenStore) -> None:
    shown = request.token if isinstance(request, m.Ping) else None
    # JSON can hold halves of characters, which plain UTF-8 cannot.
    role = known.role_of((shown or "").encode("utf-8", "surrogatepass"))
    if role is None:
        raise RemoteProtocolError(
            "this port wants a token: the first message must be PING with the right one as `token`"
        )
    if role < TokenRole.CLIENT:
        raise RemoteProtocolError(
            f"this port wants a token of the role {TokenRole.CLIENT.label}, and this one is a "
            f"{role.label}'s"
        )


class RLlinkServer:
    """Listens for simulators.

    Args:
        admit: Begins the session of a client that has shown the token.
        address: ``HOST:PORT``; port 0: a free one.
        token: What clients must show in their first PING, or the file with such tokens; required
            unless ``address`` is loopback; False: nothing, on purpose.
        tls: Files for TLS; None for plain text.
        limits: What a client may ask of the port.

    Raises:
        AddressError: ``address`` is malformed, or needs a token.
        ConfigurationError: ``token`` is nothing that can be shown, or Ray's own, or a file cannot
            be used.
    """

    def __init__(
        self,
        admit: Admit,
        *,
        address: str = "127.0.0.1:0",
        token: ServerToken = None,
        tls: TlsSource | None = None,
        limits: RLlinkLimits | None = None,
    ) -> None:
        self._wanted = checked_address(address, token)
        if self._wanted.path:
            raise AddressError(f"{address}: RLlink is spoken over TCP; give HOST:PORT")
        self._begin = admit
        self._known = token_store(token)
        files = resolve_server_tls(tls)
        self._tls = None if files is None else files.context()
        self._limits = limits or RLlinkLimits()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        # Connections that have not been admitted by their first message, the oldest first.
        self._strangers: dict[asyncio.Task[None], None] = {}
        self._bound: Address | None = None

    @property
    def address(self) -> str:
        return str(self._bound or self._wanted)

    @property
    def is_serving(self) -> bool:
        return self._server is not None

    def start(self) -> None:
        """Listen; clients may come before this returns.

        Raises:
            ListenError: The address is in use, or not this machine's.
        """
        if self._known is None:
            warn_without_token(self._wanted)
        try:
            shared_loop().run(self._start())
        except OSError as error:
            raise ListenError(
                f"cannot listen on {self._wanted}: {error}; give another port, or 0 for a free one"
            ) from error

    def stop(self) -> None:
        """Close the port and every connection. Idempotent; blocks. In a fork, it does nothing."""
        if self._server is not None and not is_fork():
            shared_loop().run(self._stop(), _STOP_S)

    async def _start(self) -> None:
        self._server = await asyncio.start_server(
            self._serve,
            **listen_arguments(self._wanted),
            limit=2**18,
            ssl=self._tls,
            ssl_handshake_timeout=self._limits.stranger_timeout_s if self._tls else None,
        )
        port = self._server.sockets[0].getsockname()[1]
        self._bound = Address(self._wanted.host, port)

    async def _stop(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        tasks = [*self._tasks, *self._strangers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connection = RLlinkConnection(reader, writer, self._limits)
        if self._server is None:
            writer.close()
            return
        self._admit(task)
        try:
            await connection.serve(self._begin, self._known, partial(self._seat, task))
        except (OSError, EOFError, TimeoutError) as error:
            _LOG.info("%s has gone: %s", connection.peer, error or type(error).__name__)
        except asyncio.CancelledError:
            pass  # the port is closed: asyncio's server would log it
        finally:
            self._tasks.discard(task)
            self._strangers.pop(task, None)
            writer.transport.abort()

    def _admit(self, task: "asyncio.Task[None]") -> None:
        if len(self._strangers) >= self._limits.max_strangers:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
        self._strangers[task] = None

    def _seat(self, task: "asyncio.Task[None]") -> bool:
        """Count a client that may stay; return whether there is a place."""
        self._strangers.pop(task, None)
        if len(self._tasks) >= self._limits.max_clients:
            return False
        try:
            require_descriptors(0)
        except CapacityError as error:
            _LOG.warning("a simulator is refused: %s", error.message)
            return False
        self._tasks.add(task)
        return True
