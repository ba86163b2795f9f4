"""A bidirectional call with callbacks in gRPC's own thread; any thread may write to it.

grpc.aio takes most of a core for some thousand messages a second, so that its user is late himself,
and gRPC's other bidirectional calls have two threads each. This one is made as those are, with
parts of gRPC that are not public (``grpc._channel``), but one thread serves all calls of a channel.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from grpc._common import CYGRPC_STATUS_CODE_TO_STATUS_CODE
from grpc._cython import cygrpc

from rlmesh_ray.grpc_setup import grpc

_KINDS = cygrpc.OperationType
_NO_FLAGS = 0


class CallbackCall:
    """One call of raw bytes.

    Args:
        channel: Over which; without interceptors.
        path: Of the RPC.
        on_message: Called with each message, one after the other, in gRPC's thread.
        on_end: Called with the call's status, once, after the last message.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        path: str,
        on_message: Callable[[bytes], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._lock = threading.Lock()
        self._outbox: deque[bytes] = deque()
        self._is_sending = False
        self._status = ""
        begun = (
            (
                cygrpc.SendInitialMetadataOperation((), _NO_FLAGS),
                cygrpc.ReceiveStatusOnClientOperation(_NO_FLAGS),
            ),
            (cygrpc.ReceiveInitialMetadataOperation(_NO_FLAGS),),
            (cygrpc.ReceiveMessageOperation(_NO_FLAGS),),
        )
        # Operations that gRPC has begun and not completed: the call is over when there are none.
        self._num_under_way = len(begun)
        rpc: Any = channel.stream_stream(path)
        with self._lock:  # its thread may be quicker than this one
            self._call = rpc._managed_call(
                _NO_FLAGS,
                path.encode(),
                None,  # the host
                None,  # its deadline
                (),  # its metadata
                None,  # its credentials
                begun,
                self._take,
                None,  # its context
                None,  # its registered path
            )

    def write(self, message: bytes) -> None:
        """Send ``message`` after those before it, without waiting; none after the call's end."""
        with self._lock:
            self._outbox.append(message)
            if not self._is_sending:
                self._send_next()

    def cancel(self) -> None:
        """End it."""
        self._call.cancel(cygrpc.StatusCode.cancelled, "its user has had enough")

    def _take(self, event: Any) -> bool:
        """Take what gRPC has done; return whether that was the last of the call."""
        message: bytes | None = None
        with self._lock:
            self._num_under_way -= 1
            for operation in event.batch_operations:
                match operation.type():
                    case _KINDS.receive_message:
                        message = operation.message()
                    case _KINDS.send_message:
                        self._send_next()
                    case _KINDS.receive_status_on_client:
                        code = CYGRPC_STATUS_CODE_TO_STATUS_CODE[operation.code()]
                        self._status = f"{code.name} {operation.details()}".strip()
            if message is not None:
                self._begin(cygrpc.ReceiveMessageOperation(_NO_FLAGS))
            is_over = not self._num_under_way
        if message is not None:
            self._on_message(message)
        if is_over:
            self._on_end(self._status)
        return is_over

    def _send_next(self) -> None:
        """Send the oldest message, if there is one: gRPC takes one at a time."""
        self._is_sending = bool(self._outbox) and self._begin(
            cygrpc.SendMessageOperation(self._outbox.popleft(), _NO_FLAGS)
        )

    def _begin(self, operation: Any) -> bool:
        """Have gRPC do something, unless the call has ended; return whether it does."""
        has_begun = bool(self._call.operate((operation,), self._take))
        self._num_under_way += has_begun
        return has_begun
