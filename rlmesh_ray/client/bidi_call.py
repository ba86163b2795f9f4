"""A bidirectional call of raw messages: written by one thread, read by another or the same."""

import queue
import threading
from concurrent.futures import Future
from typing import Protocol

from rlmesh_ray.client.channel import Metadata
from rlmesh_ray.compat.grpc import begin_single_threaded_call
from rlmesh_ray.grpc_setup import grpc, keep_in_forks


class BidiCall(Protocol):
    """An open call; what ends it early is raised as ``grpc.RpcError``."""

    def write(self, message: bytes) -> None:
        """Send ``message`` after those before it, without waiting."""

    def __next__(self) -> bytes:
        """Wait for the next message; StopIteration at the end. For one thread at a time."""

    def poll(self) -> bool:
        """Return whether a message is here, without waiting. For one thread at a time, likewise.

        What had come in before it was asked is found at once, where gRPC reads in the thread that
        waits; else it may take another moment.
        """

    def has_ended(self) -> bool:
        """Return whether the server has ended it, as far as that has arrived; as ``poll``."""

    def cancel(self) -> bool:
        """End it at once; for any thread."""

    def close(self) -> None:
        """End it, and release its resources. Idempotent; for any thread."""


def open_call(channel: grpc.Channel, path: str, metadata: Metadata) -> BidiCall:
    """Begin a call.

    Args:
        channel: Over which; without interceptors.
        path: Of the RPC.
        metadata: What the call carries.
    """
    call: BidiCall | None = begin_single_threaded_call(channel, path, metadata)
    return keep_in_forks(call or QueuedCall(channel, path, metadata))


class QueuedCall:
    """gRPC's own call: two of its threads pass each message on.

    Args:
        channel: See ``open_call``.
        path: See ``open_call``.
        metadata: See ``open_call``.
    """

    def __init__(self, channel: grpc.Channel, path: str, metadata: Metadata) -> None:
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call = channel.stream_stream(path)(iter(self._outbox.get, None), metadata=metadata)
        # For ``poll``, which gRPC does not have: from its first time on, a thread reads ahead.
        self._asked: queue.SimpleQueue[Future[bytes] | None] = queue.SimpleQueue()
        self._ahead: Future[bytes] | None = None
        self._reader: threading.Thread | None = None

    def write(self, message: bytes) -> None:
        """Send ``message`` after those before it, without waiting."""
        self._outbox.put(message)

    def __next__(self) -> bytes:
        """Wait for the next message."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            message: bytes = next(self._call)
            return message
        message = ahead.result()
        self._ask()
        return message

    def poll(self) -> bool:
        """Return whether a message is here, without waiting."""
        if self._reader is None:
            self._reader = threading.Thread(target=self._read_ahead, daemon=True)
            self._reader.start()
        ahead = self._ahead or self._ask()
        return ahead.done() and ahead.exception() is None

    def _ask(self) -> Future[bytes]:
        ahead = self._ahead = Future()
        self._asked.put(ahead)
        return ahead

    def has_ended(self) -> bool:
        """Return whether the server has ended it."""
        return not self._call.is_active()

    def cancel(self) -> bool:
        """End it at once."""
        return bool(self._call.cancel())

    def close(self) -> None:
        """End it, and the threads that send and read ahead."""
        self._outbox.put(None)
        self._asked.put(None)
        self._call.cancel()

    def _read_ahead(self) -> None:
        for ahead in iter(self._asked.get, None):
            try:
                ahead.set_result(next(self._call))
            except BaseException as error:  # noqa: BLE001  # ``__next__`` raises it
                ahead.set_exception(error)
