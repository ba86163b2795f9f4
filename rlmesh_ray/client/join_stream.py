"""One Join stream: sends and receives frames, with a timeout of every wait."""

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from rlmesh_ray.client.channel import Metadata, translate_grpc_error
from rlmesh_ray.compat.grpc import begin_single_threaded_call
from rlmesh_ray.errors import EndpointClosedError, EndpointError, EndpointLostError
from rlmesh_ray.grpc_setup import grpc, keep_in_forks
from rlmesh_ray.protocol.client_session import timeout_error


class BidiCall(Protocol):
    """An open call; what ends it early is raised as ``grpc.RpcError``."""

    def write(self, message: bytes) -> None:
        """Send ``message`` after those before it, without waiting."""

    def __next__(self) -> bytes:
        """Wait for the next message; StopIteration at the end. For one thread at a time."""

    def poll(self) -> bool:
        """Return whether a message is here, without waiting; for the thread of ``__next__``.

        What had come in before it was asked is found immediately, where gRPC reads in the thread
        that waits; else it may take another moment.
        """

    def has_ended(self) -> bool:
        """Return whether the server has ended it, as far as that has arrived; as ``poll``."""

    def cancel(self) -> bool:
        """End it; for any thread."""

    def close(self) -> None:
        """End it, and release its resources. Idempotent; for any thread."""


def open_call(channel: grpc.Channel, path: str, metadata: Metadata) -> BidiCall:
    """Begin a call over a channel without interceptors."""
    call: BidiCall | None = begin_single_threaded_call(channel, path, metadata)
    return keep_in_forks(call or QueuedCall(channel, path, metadata))


class QueuedCall:
    """A call by gRPC's public API: two threads of gRPC pass on each message."""

    def __init__(self, channel: grpc.Channel, path: str, metadata: Metadata) -> None:
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call = channel.stream_stream(path)(iter(self._outbox.get, None), metadata=metadata)
        # For ``poll``, which gRPC does not have: from its first time on, a thread reads ahead.
        self._asked: queue.SimpleQueue[Future[bytes] | None] = queue.SimpleQueue()
        self._ahead: Future[bytes] | None = None
        self._reader: threading.Thread | None = None

    def write(self, message: bytes) -> None:
        self._outbox.put(message)

    def __next__(self) -> bytes:
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            message: bytes = next(self._call)
            return message
        message = ahead.result()
        self._ask()
        return message

    def poll(self) -> bool:
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
        return not self._call.is_active()

    def cancel(self) -> bool:
        return bool(self._call.cancel())

    def close(self) -> None:
        # These end the threads that send and read ahead.
        self._outbox.put(None)
        self._asked.put(None)
        self._call.cancel()

    def _read_ahead(self) -> None:
        for ahead in iter(self._asked.get, None):
            try:
                ahead.set_result(next(self._call))
            except BaseException as error:  # noqa: BLE001  # ``__next__`` raises it
                ahead.set_exception(error)


class JoinStream:
    """A bidirectional stream of raw frames; one thread sends, one receives.

    Args:
        call: From ``open_call``.
        address: For error messages.
        channel: Channel of the call, closed with the stream; None: the caller closes it.
    """

    def __init__(self, call: BidiCall, address: str, channel: grpc.Channel | None = None) -> None:
        self._address = address
        self.pid = os.getpid()
        """The process that has opened it; see ``fork_guard.forked``."""
        self._is_closed = False
        self._has_answered = False
        self._timeout_s: float | None = None
        """The timeout that has ended it."""
        self._call = call
        self._channel = channel
        # gRPC keeps a call that was dropped, and with it the connection.
        self._close_call = weakref.finalize(self, _close_call, call, self.pid)
        self._close_call.atexit = False
        _start_checking()

    def send(self, frame: bytes) -> None:
        """Queue ``frame``; it leaves immediately, or as soon as those before it have."""
        if self._is_closed:
            raise EndpointClosedError("the session is closed", self._address)
        self._call.write(frame)

    def receive(self, timeout_s: float | None = None) -> bytes:
        """Wait for the next frame; EndpointTimeoutError if none comes within ``timeout_s``.

        After any error the stream is gone, and its connection is closed.
        """
        try:
            if timeout_s is None:
                frame = next(self._call)
            else:
                give_up = partial(self._give_up, timeout_s)
                try:
                    with _lock:
                        _due_s[give_up] = time.monotonic() + timeout_s
                    frame = next(self._call)
                finally:
                    with _lock:
                        _due_s.pop(give_up, None)
        except StopIteration:
            self._release()
            raise EndpointLostError("the server ended the session", self._address) from None
        except grpc.RpcError as error:
            self._release()
            raise self._translated(error) from error
        if self._timeout_s is not None:  # it came just when the call was cancelled
            self._release()
            raise timeout_error(self._timeout_s, self._address)
        self._has_answered = True
        return frame

    def poll(self) -> bool:
        """Return whether a frame is here, without waiting; for the thread that receives."""
        return self._call.poll()

    def has_ended(self) -> bool:
        """Return whether the server has ended it, without waiting; as ``poll``."""
        return self._call.has_ended()

    def close(self) -> None:
        """Cancel it, and close its connection. Idempotent; unsent frames may be lost."""
        self._is_closed = True
        self._release()

    def cancel(self) -> None:
        """End it without waiting for its reader, which then closes it; not in a fork."""
        if os.getpid() == self.pid:
            self._is_closed = True
            self._call.cancel()

    def _give_up(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._call.cancel()

    def _release(self) -> None:
        """Close the call, so that nothing but this object refers to it, and the connection.

        The call is also the error that gRPC raises: its traceback refers to all frames that waited.
        """
        self._close_call()
        if self._channel is not None:
            self._channel.close()

    def _translated(self, error: grpc.RpcError) -> EndpointError:
        is_own = isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.CANCELLED
        if is_own and self._is_closed:
            return EndpointClosedError("the session is closed", self._address)
        if is_own and self._timeout_s is not None:
            return timeout_error(self._timeout_s, self._address)
        return translate_grpc_error(error, self._address, is_open=self._has_answered)


def _close_call(call: BidiCall, pid: int) -> None:
    if os.getpid() == pid:  # a fork shares the connection with its parent
        call.close()


# gRPC's own deadline would bound the whole stream; what must be bounded is one answer. So one
# daemon thread looks a few times a second for waits whose time is up.
_PERIOD_S = 0.1
_due_s: dict[Callable[[], object], float] = {}
"""What to call repeatedly, from this time of the monotonic clock on, until the entry is removed."""
_lock = threading.Lock()
_checker: threading.Thread | None = None


@contextlib.contextmanager
def called_after(wait_s: float, function: Callable[[], object]) -> Iterator[None]:
    """Have a daemon thread call ``function``, repeatedly, if the context outlasts ``wait_s``."""
    _start_checking()
    own = partial(function)
    try:
        with _lock:
            _due_s[own] = time.monotonic() + wait_s
        yield
    finally:
        with _lock:
            _due_s.pop(own, None)


def _start_checking() -> None:
    global _checker
    with _lock:
        if _checker is None:
            name = "rlmesh-ray-deadlines"
            _checker = threading.Thread(target=_check_for_ever, name=name, daemon=True)
            _checker.start()


def _check_for_ever() -> None:
    while True:
        time.sleep(_PERIOD_S)
        _check_all()


def _check_all() -> None:
    """Check all; a separate function, so that the thread holds no wait while it sleeps."""
    # Under the lock, which the end of a wait takes, too: a later one must not be given up.
    with _lock:
        for function, due_s in _due_s.items():
            if time.monotonic() >= due_s:
                function()


def _start_over() -> None:
    """Forget the waits and the thread of the process that this one was forked from."""
    global _lock, _checker
    _due_s.clear()
    _lock, _checker = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_over)
