"""A socket between two processes of one machine, whose reader is woken by an eventfd. On Linux."""

import contextlib
import os
import socket

from rlmesh_ray.waiting import Signal


class EventfdSocket:
    """A socket whose reader waits for an eventfd instead.

    To be woken by a socket takes the processor from who has sent on it, since the kernel expects
    him to go to sleep at once; an eventfd does not.

    Args:
        connection: Owned.
        eventfd: The descriptor of our own; owned.
        peer_eventfd: Of the other end's; owned.
    """

    def __init__(self, connection: socket.socket, eventfd: int, peer_eventfd: int) -> None:
        self.connection = connection
        self._eventfd = eventfd
        self._peer_eventfd = peer_eventfd

    @property
    def signal(self) -> Signal | None:
        """What tells that something has been sent; None: this end is closed."""
        return Signal(self._eventfd, self.connection.fileno()) if self.is_open else None

    @property
    def is_open(self) -> bool:
        """Whether this end is."""
        return self.connection.fileno() >= 0

    @property
    def is_readable(self) -> bool:
        """Whether something has arrived, or the other end is gone. To be asked of an open one."""
        try:
            self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def send(self, *parts: bytes | memoryview) -> None:
        """Send ``parts``, one after the other, and wake the other end.

        Raises:
            OSError: The other end is gone, or this one closed.
        """
        data = b"".join(parts)
        sent = 0
        with contextlib.suppress(BlockingIOError):
            sent = self.connection.send(data, socket.MSG_DONTWAIT)
        # Before the rest: what is larger than the kernel's buffer leaves only as it is read.
        os.eventfd_write(self._peer_eventfd, 1)
        if sent < len(data):
            self.connection.sendall(memoryview(data)[sent:])

    def clear(self) -> None:
        """Reset the eventfd of this end, whether it was set or not."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._eventfd)

    def wake(self) -> None:
        """Wake whoever waits at this end."""
        os.eventfd_write(self._eventfd, 1)

    def hang_up(self) -> None:
        """Say nothing more and hear nothing more; whoever waits for this end wakes up."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end. Idempotent."""
        if self.is_open:
            self.connection.close()
            os.close(self._eventfd)
            os.close(self._peer_eventfd)
