"""One Join stream: sends and receives frames, with a timeout of every wait."""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Self

from rlmesh_ray.client.bidi_call import BidiCall
from rlmesh_ray.client.channel import translate_grpc_error
from rlmesh_ray.client.fork_guard import ForkGuard
from rlmesh_ray.errors import (
    EndpointClosedError,
    EndpointError,
    EndpointLostError,
    EndpointTimeoutError,
)
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol.client_session import Limit, name_limit, timeout_error


@contextlib.contextmanager
def with_timeout_limit(limit: Limit) -> Iterator[None]:
    """Have a timeout name a limit that several waits share, not what was left of it.

    Raises:
        EndpointTimeoutError: As raised inside; see ``name_limit``.
    """
    try:
        yield
    except EndpointTimeoutError as error:
        name_limit(error, limit)
        raise


class JoinStream:
    """A bidirectional stream of raw frames; one thread sends, one receives.

    Args:
        call: From ``open_call``.
        address: For error messages.
        channel: Channel of the call, closed with the stream; None: the caller closes it.
    """

    def __init__(self, call: BidiCall, address: str, channel: grpc.Channel | None = None) -> None:
        self._address = address
        self._process = ForkGuard(address)
        self._is_closed = False
        self._has_answered = False
        self._timeout_s: float | None = None
        """The timeout that has ended it."""
        self._call = call
        self._channel = channel
        # gRPC keeps a call that was dropped, and with it the connection.
        self._close_call = weakref.finalize(self, _close_call, call, os.getpid())
        self._close_call.atexit = False

    def send(self, frame: bytes) -> None:
        """Queue ``frame``; it leaves at once, or as soon as those before it have.

        Raises:
            EndpointClosedError: The stream was closed on this side.
        """
        if self._is_closed:
            raise EndpointClosedError("the session is closed", self._address)
        self._call.write(frame)

    def receive(self, timeout_s: float | None = None) -> bytes:
        """Wait for the next frame.

        Raises:
            EndpointTimeoutError: None came within ``timeout_s``.
            EndpointClosedError: The stream was closed on this side.
            EndpointError: The stream broke; the class says how.

        After any error the stream is gone, and its connection is closed.
        """
        try:
            with CallDeadline(timeout_s, self._give_up):
                frame = next(self._call)
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

    def frames(self) -> Iterator[bytes]:
        """Yield frames until the stream ends; for a thread that only receives."""
        while True:
            yield self.receive()

    def close(self) -> None:
        """Cancel it, and close its connection. Idempotent; unsent frames may be lost."""
        self._is_closed = True
        self._release()

    def cancel(self) -> None:
        """End it without waiting for its reader, which then closes it; not in a fork."""
        if self._process.is_owner:
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


class CallDeadline:
    """Ends a wait when its time is up, without a timer thread for each.

    gRPC's own deadline would bound the whole stream; what must be bounded is one answer.

    Args:
        timeout_s: How long to wait; None: for ever.
        give_up: Called in another thread with ``timeout_s`` when the time is up.
    """

    def __init__(self, timeout_s: float | None, give_up: Callable[[float], None]) -> None:
        self._timeout_s = timeout_s
        self._expires_s = 0.0 if timeout_s is None else time.monotonic() + timeout_s
        self._give_up = give_up

    def __enter__(self) -> Self:
        if self._timeout_s is not None:
            _WATCHDOG.watch(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timeout_s is not None:
            _WATCHDOG.forget(self)

    def check(self, now_s: float) -> None:
        """Give up if the time is up."""
        if self._timeout_s is not None and now_s >= self._expires_s:
            self._give_up(self._timeout_s)


class _Watchdog:
    """Checks all open deadlines a few times a second, from one daemon thread."""

    _PERIOD_S = 0.1

    def __init__(self) -> None:
        self._open: set[CallDeadline] = set()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def watch(self, deadline: CallDeadline) -> None:
        with self._lock:
            self._open.add(deadline)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="rlmesh-ray-deadlines", daemon=True
                )
                self._thread.start()

    def start_over(self) -> None:
        """Forget the thread of the process that this one was forked from."""
        self.__init__()  # type: ignore[misc]

    def forget(self, deadline: CallDeadline) -> None:
        with self._lock:
            self._open.discard(deadline)

    def _run(self) -> None:
        while True:
            time.sleep(self._PERIOD_S)
            self._check()

    def _check(self) -> None:
        """Check all; a separate function, so that the thread holds no deadline while it sleeps."""
        # Under the lock, which the end of a wait takes, too: a later one must not be given up.
        with self._lock:
            for deadline in self._open:
                deadline.check(time.monotonic())


_WATCHDOG = _Watchdog()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_WATCHDOG.start_over)
