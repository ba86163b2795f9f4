"""The endpoint's handle on a direct road between a client and a worker."""

import contextlib
import os
import socket
from collections.abc import Sequence

from rlmesh_ray.options import SHARED_MEMORY, TCP


class DirectHandle:
    """A road that the endpoint can look at and cut, but does not use.

    Args:
        to_send: Descriptors of the memory that the client gets, and of its eventfds; owned. Empty:
            a connection over TCP.
        connection: To the client, or the client's end; owned, and kept, since cutting it ends the
            road for both.
    """

    def __init__(self, to_send: Sequence[int], connection: socket.socket) -> None:
        self._to_send = list(to_send)
        self._connection = connection
        self.num_descriptors = 1 + len(to_send)
        """How many the worker has got of it."""

    @property
    def transport(self) -> str:
        """What steps travel by: a value of ``RemoteEnv``'s option."""
        return SHARED_MEMORY if self.num_descriptors > 1 else TCP

    @property
    def is_disconnected(self) -> bool:
        """Whether ``disconnect`` was called."""
        return self._connection.fileno() < 0

    @property
    def has_ended(self) -> bool:
        """Whether the client has ended it."""
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

    def send(self, word: bytes) -> None:
        """Send the client of a road over TCP a word, before it asks for anything; never blocks.

        Raises:
            OSError: It cannot be sent.
        """
        self._connection.send(word, socket.MSG_DONTWAIT)

    def disconnect(self) -> None:
        """End the road on both sides, at once. Idempotent."""
        self._close_descriptors()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _close_descriptors(self) -> None:
        while self._to_send:
            os.close(self._to_send.pop())
