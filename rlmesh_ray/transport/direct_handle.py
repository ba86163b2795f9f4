"""DirectHandle: the endpoint's handle on the direct connection between a client and a worker."""

import contextlib
import os
import socket
from collections.abc import Sequence

from rlmesh_ray.options import SHARED_MEMORY, TCP


class DirectHandle:
    """Disconnects a direct connection, which the endpoint itself does not use.

    Args:
        to_send: Descriptors of the client's step buffers and of the eventfds; owned. Empty for TCP.
        connection: The socket to the client, or the client's end; owned and kept: shutting it down
            disconnects both client and worker.
    """

    def __init__(self, to_send: Sequence[int], connection: socket.socket) -> None:
        self._to_send = list(to_send)
        self._connection = connection
        self.num_descriptors = 1 + len(to_send)
        """Number of descriptors that the worker receives for the connection."""

    @property
    def transport(self) -> str:
        """Transport of the steps: ``"shared_memory"`` or ``"tcp"``."""
        return SHARED_MEMORY if self.num_descriptors > 1 else TCP

    @property
    def is_disconnected(self) -> bool:
        return self._connection.fileno() < 0

    @property
    def has_ended(self) -> bool:
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send_descriptors(self, to: socket.socket, hello: bytes) -> None:
        """Send ``hello`` and the client's descriptors to a client; never blocks.

        Raises:
            OSError: It cannot be sent.
        """
        buffers, *eventfds = self._to_send
        descriptors = [buffers, self._connection.fileno(), *eventfds]
        socket.send_fds(to, [hello], descriptors, socket.MSG_DONTWAIT)
        self._close_descriptors()

    def send(self, data: bytes) -> None:
        """Send bytes to a TCP client, before its first request; never blocks.

        Raises:
            OSError: They cannot be sent.
        """
        self._connection.send(data, socket.MSG_DONTWAIT)

    def disconnect(self) -> None:
        """Disconnect client and worker at once. Idempotent."""
        self._close_descriptors()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _close_descriptors(self) -> None:
        while self._to_send:
            os.close(self._to_send.pop())
