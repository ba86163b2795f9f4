"""AuthenticatingListener: a listening socket with a limit on unauthenticated connections."""

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
"""Handles a new connection, which is closed afterwards; calls the second argument once the peer is
authenticated."""

_MAX_UNAUTHENTICATED = 16
"""Most unauthenticated connections; a client authenticates at once."""
_BACKLOG = 64
_PAUSE_S = 1.0
_CREDENTIALS = struct.Struct("3i")
"""Linux's ucred of a peer: its process, user and group."""


class AuthenticatingListener:
    """Accepts connections, of which only a few may be unauthenticated. For the serving loop.

    Above the limit a new connection replaces the oldest unauthenticated one, but a connection of
    another local user never replaces one of the server's own user.

    Args:
        listener: Bound socket; owned.
        authenticate: Handler of each connection.
        purpose: Purpose of the connections, for the log.
    """

    def __init__(self, listener: socket.socket, authenticate: Authenticate, purpose: str) -> None:
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._authenticate = authenticate
        self._purpose = purpose
        self._handshakes: set[asyncio.Task[None]] = set()
        # The unauthenticated ones, the oldest first; True: of another local user.
        self._unauthenticated: dict[asyncio.Task[None], bool] = {}
        self._serving = asyncio.ensure_future(self._serve(listener))
        self._serving.add_done_callback(lambda _: listener.close())

    def stop(self) -> None:
        """Stop listening; authenticated connections are still handled. Idempotent."""
        for task in (self._serving, *self._unauthenticated):
            task.cancel()

    async def _serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, perhaps: sessions use the Join stream
                _LOG.warning("%s cannot be opened for clients: %s", self._purpose, error)
                await asyncio.sleep(_PAUSE_S)
                continue
            self._admit(client)
            await asyncio.sleep(0)  # a flood of connections must not starve the loop

    def _admit(self, client: socket.socket) -> None:
        """Handle a new connection, if the limit of unauthenticated ones allows it."""
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
        # Callbacks, since the task may be cancelled before it starts.
        task.add_done_callback(lambda _: client.close())
        task.add_done_callback(self._handshakes.discard)
        task.add_done_callback(lambda _: self._unauthenticated.pop(task, None))

    async def _run_handshake(self, client: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        client.setblocking(False)
        # A peer that sends nothing, or hangs up, affects no other connection.
        with client, contextlib.suppress(OSError, TimeoutError):
            await self._authenticate(client, partial(self._mark_authenticated, task))

    def _mark_authenticated(self, task: "asyncio.Task[None]") -> None:
        self._unauthenticated.pop(task, None)


def peer_uid(client: socket.socket) -> int:
    """Return the user id of the peer's process; -1 where the kernel does not report it."""
    try:
        ucred = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except (OSError, AttributeError):
        return -1
    return int(_CREDENTIALS.unpack(ucred)[1])


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
