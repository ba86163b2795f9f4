"""The endpoint's handle on a road between a client and a worker."""

import contextlib
import os
import socket
from collections.abc import Sequence


class LentRoad:
    """A road that the endpoint can look at and cut, but does not use.

    Args:
        given: Descriptors of the road's block and of its eventfds, for the client; owned.
        connection: The client's end; owned, and kept, since cutting it ends the road for both.
    """

    def __init__(self, given: Sequence[int], connection: socket.socket) -> None:
        self._given = list(given)
        self._connection = connection

    @property
    def is_cut(self) -> bool:
        """Whether ``cut`` was called."""
        return self._connection.fileno() < 0

    def give(self, to: socket.socket, greeting: bytes) -> None:
        """Send ``greeting`` and the client's descriptors to a client; never blocks.

        Raises:
            OSError: It cannot be sent.
        """
        block, *eventfds = self._given
        descriptors = [block, self._connection.fileno(), *eventfds]
        socket.send_fds(to, [greeting], descriptors, socket.MSG_DONTWAIT)
        self._let_go()

    def cut(self) -> None:
        """End the road on both sides, at once. Idempotent."""
        self._let_go()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _let_go(self) -> None:
        while self._given:
            os.close(self._given.pop())
