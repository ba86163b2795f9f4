"""The endpoint's handle on a line between a client and a worker."""

import contextlib
import os
import socket

from rlmesh_ray.envs.line_control import LineControl


class LentLine:
    """A line that the endpoint can look at and cut, but does not use.

    Args:
        block: Descriptor of the line's block; owned.
        connection: The client's end; owned, and kept, since cutting it ends the line for both.
        control: Shared with the worker.
    """

    def __init__(self, block: int, connection: socket.socket, control: LineControl) -> None:
        self._block = block
        self._connection = connection
        self.control = control

    @property
    def is_cut(self) -> bool:
        """Whether ``cut`` was called."""
        return self._connection.fileno() < 0

    def give(self, to: socket.socket, greeting: bytes) -> None:
        """Send ``greeting`` and the client's descriptors to a client; never blocks.

        Raises:
            OSError: It cannot be sent.
        """
        socket.send_fds(
            to, [greeting], [self._block, self._connection.fileno()], socket.MSG_DONTWAIT
        )
        os.close(self._block)
        self._block = -1

    def cut(self) -> None:
        """End the line on both sides, at once. Idempotent."""
        if self._block >= 0:
            os.close(self._block)
            self._block = -1
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
