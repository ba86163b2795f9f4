"""Where clients on this machine come for a road to their worker.

Descriptors do not pass through gRPC, so the endpoint listens on a unix socket, too. It is in the
abstract namespace: nothing is left of it, and only who shares this network namespace finds it.
That a client gets descriptors there is the proof that it is on this machine. What lets it in is
its session id, which only its handshake told, and which nobody can guess.

Every user of the machine can connect. Connections that have not sent a session id are few, and
a new one takes the place of the oldest; a connection of another user never replaces one of the
server's own user.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable

from rlmesh_ray.protocol import capabilities
from rlmesh_ray.transport import shared_memory as wire
from rlmesh_ray.transport.lent_road import LentRoad
from rlmesh_ray.transport.memory import can_seal

_LOG = logging.getLogger(__name__)

Lend = Callable[[int], Awaitable[LentRoad | None]]
"""Given the timeout of a client's steps, lends its session a road; None: not now."""
TakeBack = Callable[[], Awaitable[None]]
"""Ends a session's road, after the step that is in progress; it may have none."""

_GREETING_TIMEOUT_S = 5.0
_MAX_SILENT = 16
"""Connections that have not sent their greeting. Clients send it at once."""
_BACKLOG = 64
_PAUSE_S = 1.0
_CREDENTIALS = struct.Struct("3i")
"""What Linux tells of a peer: its process, user and group."""


class Broker:
    """Hands roads to the clients of open sessions. For the serving loop.

    Args:
        is_possible: Whether the environment's values have a fixed size.
    """

    def __init__(self, *, is_possible: bool) -> None:
        self._name = secrets.token_hex(wire.SOCKET_NAME_LENGTH // 2)
        self._is_possible = is_possible and can_seal()
        self._open: dict[str, tuple[Lend, TakeBack]] = {}
        self._greetings: set[asyncio.Task[None]] = set()
        # Those that have not sent their greeting, the oldest first; whether each is another user's.
        self._silent: dict[asyncio.Task[None], bool] = {}
        self._serving: asyncio.Task[None] | None = None

    @property
    def able(self) -> dict[str, str]:
        """The capability to show; empty if there are no roads here."""
        return {capabilities.SHARED_MEMORY: self._name} if self._is_possible else {}

    async def start(self) -> None:
        """Begin to listen, where there are roads at all."""
        if not self._is_possible:
            return
        listener = socket.socket(socket.AF_UNIX)
        listener.setblocking(False)
        listener.bind(wire.SOCKET_PREFIX + self._name.encode())
        listener.listen(_BACKLOG)
        self._serving = asyncio.ensure_future(self._serve(listener))

    async def stop(self) -> None:
        """Listen no more, and end all roads after the steps that are in progress. Idempotent."""
        for task in (self._serving, *self._silent):  # the others are given their roads
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
                self._admit(client)

    def _admit(self, client: socket.socket) -> None:
        """Listen to a new connection, if there is a place among the silent ones."""
        is_other_user = user_of(client) not in (os.geteuid(), 0)
        if len(self._silent) >= _MAX_SILENT:
            other_users = (task for task, is_other in self._silent.items() if is_other)
            oldest = next(other_users, None)
            if oldest is None and not is_other_user:
                oldest = next(iter(self._silent))
            if oldest is None:
                client.close()
                return
            del self._silent[oldest]
            oldest.cancel()
        task = asyncio.ensure_future(self._greet(client))
        self._greetings.add(task)
        self._silent[task] = is_other_user
        # Also where it is cancelled before it has begun.
        task.add_done_callback(lambda _: client.close())
        task.add_done_callback(self._greetings.discard)
        task.add_done_callback(lambda _: self._silent.pop(task, None))

    async def _greet(self, client: socket.socket) -> None:
        # Whoever says nothing, or hangs up, has no road; nobody else is held up.
        with client, contextlib.suppress(OSError, TimeoutError):
            client.setblocking(False)
            async with asyncio.timeout(_GREETING_TIMEOUT_S):
                greeting = wire.Greeting.unpack(await _receive(client, wire.GREETING_BYTES))
            task = asyncio.current_task()
            assert task is not None
            self._silent.pop(task, None)
            session = self._open.get(greeting.session_id)
            road = await session[0](greeting.timeout_ms) if session is not None else None
            if road is None:
                client.send(wire.REFUSED)
                return
            try:
                road.give(client, wire.ACCEPTED)
            except OSError:
                road.cut()
                raise


def user_of(client: socket.socket) -> int:
    """Return the id of the user whose process has connected; -1 if the kernel does not tell."""
    try:
        told = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except (OSError, AttributeError):
        return -1
    return int(_CREDENTIALS.unpack(told)[1])


async def _receive(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        received = await asyncio.get_running_loop().sock_recv(client, size - len(data))
        if not received:
            raise ConnectionResetError("the client has hung up")
        data += received
    return data
