"""A listening socket whose connections have to say soon who they are."""

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from functools import partial

_LOG = logging.getLogger(__name__)

Authenticate = Callable[[socket.socket, Callable[[], None]], Awaitable[None]]
"""Greets a new connection, which closes afterwards, and calls the second argument when it knows who
that is."""

_MAX_UNAUTHENTICATED = 16
"""Connections that have not said who they are. Clients do at once."""
_BACKLOG = 64
_PAUSE_S = 1.0
_CREDENTIALS = struct.Struct("3i")
"""What Linux tells of a peer: its process, user and group."""


class AuthenticatingListener:
    """Listens, and lets a few connections in that nobody knows. For the serving loop.

    A new one takes the place of the oldest; a connection of another user of this machine never
    replaces one of the server's own user.

    Args:
        listener: Bound; owned.
        authenticate: What happens with each connection.
        purpose: What connections are for, for the log.
    """

    def __init__(self, listener: socket.socket, authenticate: Authenticate, purpose: str) -> None:
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._authenticate = authenticate
        self._purpose = purpose
        self._handshakes: set[asyncio.Task[None]] = set()
        # Those that have not said who they are, the oldest first; whether each is another user's.
        self._unauthenticated: dict[asyncio.Task[None], bool] = {}
        self._serving = asyncio.ensure_future(self._serve(listener))
        self._serving.add_done_callback(lambda _: listener.close())

    def stop(self) -> None:
        """Listen no more; who has said who it is gets what it wants. Idempotent."""
        for task in (self._serving, *self._unauthenticated):
            task.cancel()

    async def _serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, perhaps: sessions use messages
                _LOG.warning("no client can be given %s: %s", self._purpose, error)
                await asyncio.sleep(_PAUSE_S)
                continue
            self._admit(client)
            await asyncio.sleep(0)  # a flood of connections is not all that the loop does

    def _admit(self, client: socket.socket) -> None:
        """Listen to a new connection, if there is a place among the silent ones."""
        is_other_user = client.family == socket.AF_UNIX and peer_uid(client) not in (
            os.geteuid(),
            0,
        )
        if len(self._unauthenticated) >= _MAX_UNAUTHENTICATED:
            other_users = (task for task, is_other in self._unauthenticated.items() if is_other)
            oldest = next(other_users, None)
            if oldest is None and not is_other_user:
                oldest = next(iter(self._unauthenticated))
            if oldest is None:
                client.close()
                return
            del self._unauthenticated[oldest]
            oldest.cancel()
        task = asyncio.ensure_future(self._run_handshake(client))
        self._handshakes.add(task)
        self._unauthenticated[task] = is_other_user
        # Also where it is cancelled before it has begun.
        task.add_done_callback(lambda _: client.close())
        task.add_done_callback(self._handshakes.discard)
        task.add_done_callback(lambda _: self._unauthenticated.pop(task, None))

    async def _run_handshake(self, client: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        client.setblocking(False)
        # Whoever says nothing, or hangs up, gets nothing; nobody else is held up.
        with client, contextlib.suppress(OSError, TimeoutError):
            await self._authenticate(client, partial(self._mark_authenticated, task))

    def _mark_authenticated(self, task: "asyncio.Task[None]") -> None:
        self._unauthenticated.pop(task, None)


def peer_uid(client: socket.socket) -> int:
    """Return the id of the user whose process has connected; -1 if the kernel does not tell."""
    try:
        told = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except (OSError, AttributeError):
        return -1
    return int(_CREDENTIALS.unpack(told)[1])


async def read_exactly(client: socket.socket, size: int) -> bytes:
    """Return the next ``size`` bytes.

    Raises:
        OSError: The client has hung up.
    """
    data = b""
    while len(data) < size:
        more = await asyncio.get_running_loop().sock_recv(client, size - len(data))
        if not more:
            raise ConnectionResetError("the client has hung up")
        data += more
    return data
