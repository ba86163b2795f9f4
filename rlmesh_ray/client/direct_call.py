"""A bidirectional call whose messages are handed through no other thread.

gRPC's own bidirectional calls have one thread that sends and one that receives, besides that of
their user. To wake them takes longer than all else that gRPC does with a small message. It can do
without, but offers that only for calls with a single request
(``grpc.experimental.ChannelOptions.SingleThreadedUnaryStream``). Here it is done for many, with
parts of gRPC that are not public; see ``bidi_call`` for where they are not as expected.
"""

import functools
import threading
import time
from collections import deque
from typing import Any, Self

from grpc._channel import _RPCState, _SingleThreadedRendezvous
from grpc._cython import cygrpc

from rlmesh_ray.client.channel import Metadata
from rlmesh_ray.rpc import grpc

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


class DirectCall(_SingleThreadedRendezvous):  # type: ignore[misc]  # gRPC has no types
    """A call with a completion queue of its own, which whoever reads empties; see ``begin``."""

    _channel: grpc.Channel
    """Kept: a channel that nobody keeps ends its calls."""
    _outbox: deque[bytes]
    _reading: threading.Lock

    @classmethod
    def begin(cls, channel: grpc.Channel, path: str, metadata: Metadata) -> Self:
        """Begin a call.

        Args:
            channel: Over which; without interceptors.
            path: Of the RPC.
            metadata: What the call carries.
        """
        private: Any = channel
        state = _RPCState(_DUE_AT_FIRST, None, None, None, None)
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

        A second one leaves when somebody reads: gRPC takes one at a time, and tells there that it
        has.
        """
        with self._state.condition:
            self._outbox.append(message)
            self._send_next()

    def __next__(self) -> bytes:
        """Wait for the next message."""
        with self._reading:
            message: bytes = self._asked() if self._is_asked() else self._next()
        return message

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
        finally:
            self._reading.release()

    def _ask(self) -> bool:
        """Ask gRPC for the next message, once; return whether it is here or may come."""
        state = self._state
        with state.condition:
            if self._is_asked() or state.code is not None:
                return state.response is not None or state.code is None
            # ``due`` first, as gRPC does: a signal may come between the two.
            state.due.add(_KINDS.receive_message)
            asking = (cygrpc.ReceiveMessageOperation(_NO_FLAGS),)
            is_asked = bool(self._call.operate(asking, None))
            if not is_asked:
                state.due.remove(_KINDS.receive_message)
            return is_asked

    def _is_asked(self) -> bool:
        """Tell whether ``poll`` has asked gRPC for the next message, or has it."""
        return self._state.response is not None or _KINDS.receive_message in self._state.due

    def _asked(self) -> Any:
        message, self._state.response = self._state.response, None
        return self._next_response() if message is None else message

    def close(self) -> None:
        """End it, and take what gRPC still has to tell: until then, it keeps the call."""
        self.cancel()
        with self._reading:
            while self._state.due:
                self._consume_next_event()

    def _consume_next_event(self) -> Any:
        try:
            event = super()._consume_next_event()
        except BaseException:
            # The handler of a signal has raised: gRPC lets go of a call then, and to ask it for
            # what was due would crash, or take for ever.
            self.cancel()
            self._state.due.clear()
            raise
        with self._state.condition:
            self._send_next()
        return event

    def _send_next(self) -> None:
        state = self._state
        if not self._outbox or state.code is not None or _KINDS.send_message in state.due:
            return
        # As gRPC does for what it receives: what has been asked for is due, whoever interrupts us.
        state.due.add(_KINDS.send_message)
        sending = cygrpc.SendMessageOperation(self._outbox.popleft(), _NO_FLAGS)
        if not self._call.operate((sending,), None):
            state.due.remove(_KINDS.send_message)


def _read_sockets() -> None:
    """Have gRPC read from all its sockets once, without waiting."""
    _empty_queue().poll(0.0)


@functools.cache
def _empty_queue() -> Any:
    """Return a completion queue without events: to poll it reads the sockets of all calls."""
    return cygrpc.CompletionQueue()
