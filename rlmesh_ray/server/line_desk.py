"""Where clients on this machine come for a line to their worker.

Descriptors do not pass through gRPC, so the endpoint listens on a unix socket, too. It is in the
abstract namespace: nothing is left of it, and only who shares this network namespace finds it.
That a client gets descriptors there is the proof that it is on this machine. What lets it in is
its session id, which only its handshake told, and which nobody can guess.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable

from rlmesh_ray.envs.lent_line import LentLine
from rlmesh_ray.envs.memory import can_seal
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.server.loop import shared_loop
from rlmesh_ray.wire import line_v1 as wire

_LOG = logging.getLogger(__name__)

Lend = Callable[[int], Awaitable[LentLine | None]]
"""Given the timeout of a client's steps, lends its session a line; None: not now."""
TakeBack = Callable[[], Awaitable[None]]
"""Ends a session's line, after the step that is in progress; it may have none."""

_GREETING_TIMEOUT_S = 5.0
_MAX_GREETINGS = 64
_BACKLOG = 64
_PAUSE_S = 1.0


class LineDesk:
    """Hands lines to the clients of open sessions. For the serving loop.

    Args:
        is_possible: Whether the environment's values have a fixed size.
    """

    def __init__(self, *, is_possible: bool) -> None:
        self._name = secrets.token_hex(wire.SOCKET_NAME_LENGTH // 2)
        self._is_possible = is_possible and can_seal()
        self._open: dict[str, tuple[Lend, TakeBack]] = {}
        self._greetings: set[asyncio.Task[None]] = set()
        self._serving: asyncio.Task[None] | None = None

    @property
    def able(self) -> dict[str, str]:
        """The capability to show; empty if there are no lines here."""
        return {capabilities.SHARED_MEMORY: self._name} if self._is_possible else {}

    def start(self) -> None:
        """Begin to listen; not from the serving loop."""
        if self._is_possible:
            shared_loop().run(self._start())

    async def _start(self) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.setblocking(False)
        listener.bind(wire.SOCKET_PREFIX + self._name.encode())
        listener.listen(_BACKLOG)
        self._serving = asyncio.ensure_future(self._serve(listener))

    async def stop(self) -> None:
        """Listen no more, and end all lines after the steps that are in progress. Idempotent."""
        for task in (self._serving, *self._greetings):
            if task is not None:
                task.cancel()
        await asyncio.gather(*(take_back() for _, take_back in self._open.values()))

    def open(self, session_id: str, lend: Lend, take_back: TakeBack) -> Callable[[], None]:
        """Let the client of a session come, until it calls what is returned, once or more."""
        own = (lend, take_back)
        # Whoever comes second with the same id is a replay.
        self._open.setdefault(session_id, own)

        def close() -> None:
            if self._open.get(session_id) is own:
                del self._open[session_id]

        return close

    async def _serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    client, _ = await loop.sock_accept(listener)
                except OSError as error:  # out of descriptors, perhaps: sessions use messages
                    _LOG.warning("no client can be given shared memory: %s", error)
                    await asyncio.sleep(_PAUSE_S)
                    continue
                if len(self._greetings) >= _MAX_GREETINGS:
                    client.close()
                    continue
                task = asyncio.ensure_future(self._greet(client))
                self._greetings.add(task)
                task.add_done_callback(self._greetings.discard)

    async def _greet(self, client: socket.socket) -> None:
        # Whoever says nothing, or hangs up, has no line; nobody else is held up.
        with client, contextlib.suppress(OSError, TimeoutError):
            client.setblocking(False)
            async with asyncio.timeout(_GREETING_TIMEOUT_S):
                greeting = wire.Greeting.unpack(await _receive(client, wire.GREETING_BYTES))
            session = self._open.get(greeting.session_id)
            line = await session[0](greeting.timeout_ms) if session is not None else None
            if line is None:
                client.send(wire.REFUSED)
                return
            try:
                line.give(client, wire.ACCEPTED)
            except OSError:
                line.cut()
                raise


async def _receive(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        received = await asyncio.get_running_loop().sock_recv(client, size - len(data))
        if not received:
            raise ConnectionResetError("the client has hung up")
        data += received
    return data
