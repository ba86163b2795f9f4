"""A bidirectional call without threads of gRPC.

gRPC's own bidirectional calls have one thread that sends and one that receives, besides that of
their user. To wake them takes longer than all else that gRPC does with a small message. gRPC offers
calls without them only for a single request
(``grpc.experimental.ChannelOptions.SingleThreadedUnaryStream``). Here it is done for many, with
private parts of gRPC; ``compat.grpc`` falls back to gRPC's own calls where they have changed.
"""

import functools
import threading
import time
import traceback
from collections import deque
from typing import Any, Self

from grpc._channel import _RPCState, _SingleThreadedRendezvous
from grpc._cython import cygrpc

from rlmesh_ray.grpc_setup import grpc

_KINDS = cygrpc.OperationType
_DUE_AT_FIRST = (
    _KINDS.send_initial_metadata,
    _KINDS.receive_initial_metadata,
    _KINDS.receive_status_on_client,
)
_NO_FLAGS = 0

_PRIVATE = ("_next", "_next_response", "_consume_next_event")
if not all(hasattr(_SingleThreadedRendezvous, name) for name in _PRIVATE):
    raise ImportError("this gRPC reads in another way")


class _StateLock(type(threading.RLock())):  # type: ignore[misc]  # its class has no public name
    """The lock of a call's state, in place of gRPC's ``threading.Condition``.

    ``with`` takes it in one go. A Condition is written in Python: the handler of a signal may run
    when it is locked and ``with`` has not begun yet, and what the handler raises leaves it locked.
    """

    def notify_all(self) -> None:
        """Do nothing: no thread waits for the state of such a call."""


class _DueOperations(set[Any]):
    """What a call still waits for.

    A reader may get it after the writer's thread has abandoned the call.
    """

    remove = set.discard


class SingleThreadedCall(_SingleThreadedRendezvous):  # type: ignore[misc]  # gRPC has no types
    """A call with a completion queue of its own, which its readers empty; see ``begin``."""

    _channel: grpc.Channel
    """Kept: a channel without references ends its calls."""
    _outbox: deque[bytes]
    _reading: threading.Lock

    @classmethod
    def begin(cls, channel: grpc.Channel, path: str, metadata: tuple[tuple[str, str], ...]) -> Self:
        """Begin a call.

        Args:
            channel: Over which; without interceptors.
            path: Of the RPC.
            metadata: What the call carries.
        """
        private: Any = channel
        state = _RPCState(_DUE_AT_FIRST, None, None, None, None)
        state.condition, state.due = _StateLock(), _DueOperations(state.due)
        state.method, state.rpc_start_time = path, time.perf_counter()
        first = (
            (
                cygrpc.SendInitialMetadataOperation(metadata, _NO_FLAGS),
                cygrpc.ReceiveStatusOnClientOperation(_NO_FLAGS),
            ),
            (cygrpc.ReceiveInitialMetadataOperation(_NO_FLAGS),),
        )
        own = private._channel.segregated_call(
            cygrpc.PropagationConstants.GRPC_PROPAGATE_DEFAULTS,
            path.encode(),
            None,  # the host
            None,  # its deadline
            metadata,
            None,  # its credentials
            tuple((operations, None) for operations in first),
            None,  # its context
            None,  # its registered path
        )
        call = cls(state, own, None, None)
        call._channel = channel
        call._outbox = deque()
        call._reading = threading.Lock()
        return call

    def write(self, message: bytes) -> None:
        """Send ``message`` after those before it, without waiting.

        A second one is sent by a reader: gRPC takes one at a time, and reports there that it
        has.
        """
        with self._state.condition:
            self._outbox.append(message)
            self._send_next()

    def __next__(self) -> bytes:
        state = self._state
        with self._reading:
            self._ask()
            message: bytes | None
            message, state.response = state.response, None
            if message is None and (state.code is None or _KINDS.receive_message in state.due):
                message = self._next_response()
        if message is not None:
            return message
        if state.code is grpc.StatusCode.OK:
            raise StopIteration
        raise self

    def poll(self) -> bool:
        """Return whether a message is here, without waiting; False while another thread reads."""
        if not self._reading.acquire(blocking=False):
            return False
        try:
            if not self._ask():
                return False  # the call has ended; ``__next__`` says how
            # Where gRPC reads in the thread that waits, nothing is read while no thread waits.
            _read_sockets()
            # Events come in order: those of all that has been read are before this one.
            if self._call.operate((), None):
                while self._consume_next_event().batch_operations:
                    pass
            return self._state.response is not None
        except BaseException as error:
            _unlock(error)
            raise
        finally:
            self._reading.release()

    def has_ended(self) -> bool:
        """Return whether the server has ended it; False while another thread reads."""
        return not self.poll() and self._state.code is not None

    def _ask(self) -> bool:
        """Ask gRPC for the next message, once; return whether it is here or may come."""
        state = self._state
        with state.condition:
            if state.response is not None:
                return True
            if _KINDS.receive_message in state.due:
                return state.code is None
            return state.code is None and self._begin(
                _KINDS.receive_message, cygrpc.ReceiveMessageOperation(_NO_FLAGS)
            )

    def close(self) -> None:
        """End it, and take the remaining events of gRPC, which keeps the call until then."""
        self.cancel()
        with self._reading:
            while self._state.due:
                self._consume_next_event()

    def _consume_next_event(self) -> Any:
        try:
            event = super()._consume_next_event()
        except BaseException as error:
            self._abandon(error)
            raise
        if self._outbox:
            with self._state.condition:
                self._send_next()
        return event

    def _send_next(self) -> None:
        state = self._state
        if self._outbox and state.code is None and _KINDS.send_message not in state.due:
            message = self._outbox.popleft()
            self._begin(_KINDS.send_message, cygrpc.SendMessageOperation(message, _NO_FLAGS))

    def _begin(self, kind: Any, operation: Any) -> bool:
        """Have gRPC do ``operation``; return whether it takes it."""
        try:
            self._state.due.add(kind)
            is_taken = bool(self._call.operate((operation,), None))
            if not is_taken:
                self._state.due.remove(kind)
        except BaseException as error:
            self._abandon(error)
            raise
        return is_taken

    def _abandon(self, error: BaseException) -> None:
        """End the call and take nothing more from it: the handler of a signal has raised.

        gRPC may have let go of the call, or not have been asked for what is due: to wait for that
        would crash, or take for ever.
        """
        _unlock(error)
        self.cancel()
        self._state.due.clear()


_LOCKING = (threading.Condition.__enter__.__code__, threading.Condition.__exit__.__code__)


def _unlock(error: BaseException) -> None:
    """Release a Condition of gRPC's Cython that the handler of a signal has left locked.

    Such as the channel's: its other threads would wait for it for ever. See ``_StateLock``; only
    the traceback leads to it.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code in _LOCKING:
            condition = frame.f_locals["self"]
            if condition._is_owned():
                condition.release()


def _read_sockets() -> None:
    """Have gRPC read from all its sockets once, without waiting."""
    _empty_queue().poll(0.0)


@functools.cache
def _empty_queue() -> Any:
    """Return a completion queue without events: to poll it reads the sockets of all calls."""
    return cygrpc.CompletionQueue()
