"""The endpoint's handle on a direct road between a client and a worker."""

import contextlib
import os
import socket
from collections.abc import Sequence

from rlmesh_ray.options import SHARED_MEMORY, TCP


class LentRoad:
    """A road that the endpoint can look at and cut, but does not use.

    Args:
        given: Descriptors of the memory that the client gets, and of its eventfds; owned. Empty: a
            road over TCP.
        connection: To the client, or the client's end; owned, and kept, since cutting it ends the
            road for both.
    """

    def __init__(self, given: Sequence[int], connection: socket.socket) -> None:
        self._given = list(given)
        self._connection = connection
        self.num_descriptors = 1 + len(given)
        """How many the worker has got of it."""

    @property
    def transport(self) -> str:
        """What steps travel by: a value of ``RemoteEnv``'s option."""
        return SHARED_MEMORY if self.num_descriptors > 1 else TCP

    @property
    def is_cut(self) -> bool:
        """Whether ``cut`` was called."""
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

    def give(self, to: socket.socket, greeting: bytes) -> None:
        """Send ``greeting`` and the client's descriptors to a client; never blocks.

        Raises:
            OSError: It cannot be sent.
        """
        block, *eventfds = self._given
        descriptors = [block, self._connection.fileno(), *eventfds]
        socket.send_fds(to, [greeting], descriptors, socket.MSG_DONTWAIT)
        self._let_go()

    def say(self, word: bytes) -> None:
        """Send the client of a road over TCP a word, before it asks for anything; never blocks.

        Raises:
            OSError: It cannot be sent.
        """
        self._connection.send(word, socket.MSG_DONTWAIT)

    def cut(self) -> None:
        """End the road on both sides, at once. Idempotent."""
        self._let_go()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _let_go(self) -> None:
        while self._given:
            os.close(self._given.pop())
