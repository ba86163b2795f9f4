"""One Process stream with a dm_env_rpc server: requests out, answers in, in order.

An answer has the kind of its request, and no id. If a server answered one request twice, every
later request would get the answer to the one before it; so an answer that has come before its
request was sent is an error.
"""

import threading
import time
from collections import deque

from rlmesh_ray.client.bidi_call import open_call
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.join_stream import JoinStream
from rlmesh_ray.dialects.dm_env_rpc.client import frames
from rlmesh_ray.dialects.dm_env_rpc.client.frames import RequestKind, WorldResponse
from rlmesh_ray.errors import (
    EndpointError,
    EndpointTimeoutError,
    EndpointUnreachableError,
    RemoteEnvError,
    RemoteProtocolError,
    install_command,
)
from rlmesh_ray.grpc_setup import grpc

_PROCESS = "/dm_env_rpc.v1.Environment/Process"


class WorldStream:
    """A stream on a connection of its own: some servers identify clients by their connections.

    Args:
        connect_options: The server.
    """

    def __init__(self, connect_options: ConnectOptions) -> None:
        channel = connect_options.open()
        call = open_call(channel, _PROCESS, connect_options.metadata)
        self.stream = JoinStream(call, connect_options.address, channel)
        self._address = connect_options.address
        # Two counts, since two threads change them.
        self._num_sent = 0
        self._num_received = 0
        self._receiving = threading.Lock()
        self._arrived: deque[bytes] = deque()
        """Answers that have not been received; at most one more than requests."""
        self._surplus: RemoteProtocolError | None = None
        self._is_surplus_raised = False

    def send(self, frame: bytes) -> None:
        """Send a request without waiting.

        An answer that has come before its request is an error, which ``receive`` raises. The
        request is sent all the same: a session that ends has worlds to leave and to destroy.

        Raises:
            EndpointClosedError: The stream was closed.
        """
        self._check_for_surplus()
        # First: a thread that closes the session meanwhile counts the answer as an expected one.
        self._num_sent += 1
        self.stream.send(frame)

    def receive(self, kind: RequestKind, end_s: float) -> WorldResponse:
        """Wait for the answer to the oldest request.

        Args:
            kind: The request's.
            end_s: When to stop waiting, in seconds of time.monotonic().

        Raises:
            RemoteEnvError: The server refused; nothing has changed.
            RemoteProtocolError: The answer is of another kind, or an answer had come before its
                request was sent.
            EndpointError: The stream broke, or no answer came in time; the stream is closed.
        """
        if self._surplus is not None:
            self._is_surplus_raised = True
            raise self._surplus
        answer = frames.parse_answer(self._next_frame(end_s))
        if answer.kind is not kind:
            raise RemoteProtocolError(
                f"a request of the kind {kind.value} was answered with {answer.kind.value}"
            )
        return answer

    def drain(self, kind: RequestKind, end_s: float) -> None:
        """Wait until the last request and all before it are answered, also with errors.

        Args:
            kind: The last request's.
            end_s: As for ``receive``.

        Raises:
            RemoteProtocolError: A frame is no answer.
            EndpointError: The stream broke, or not all answers came in time; it is closed.
        """
        is_answered = False
        # If the server answers twice, more answers may follow than there were requests.
        while self._num_received < self._num_sent or not is_answered:
            try:
                is_answered = frames.parse_answer(self._next_frame(end_s)).kind is kind
            except RemoteEnvError:
                is_answered = True
        self._check_for_surplus()

    def unraised_surplus(self) -> RemoteProtocolError | None:
        """Return the error about a surplus answer, if ``receive`` has not raised it."""
        return None if self._is_surplus_raised else self._surplus

    def close(self) -> None:
        """Close the stream and its connection. Idempotent."""
        self.stream.close()

    def _explained(self, error: EndpointUnreachableError) -> EndpointUnreachableError:
        cause = error.__cause__
        if not isinstance(cause, grpc.Call) or cause.code() is not grpc.StatusCode.UNIMPLEMENTED:
            return error
        return EndpointUnreachableError(
            "something listens there, but does not speak dm_env_rpc; an endpoint of this package "
            f"does where it is installed with its extra: {install_command('dm-env-rpc')}; "
            "without it, leave out dm_env_rpc://",
            self._address,
        )

    def _next_frame(self, end_s: float) -> bytes:
        # One thread may end the session while another waits for an answer, and gRPC allows only one
        # reader at a time.
        if not self._receiving.acquire(timeout=max(0.0, end_s - time.monotonic())):
            raise EndpointTimeoutError("another thread still waits for an answer", self._address)
        try:
            if self._arrived:
                frame = self._arrived.popleft()
            else:
                frame = self.stream.receive(max(0.0, end_s - time.monotonic()))
            self._num_received += 1
        except EndpointUnreachableError as error:
            raise self._explained(error) from error.__cause__
        finally:
            self._receiving.release()
        return frame

    def _check_for_surplus(self) -> None:
        """Note an error if more answers have come than requests were sent."""
        if self._surplus is not None or not self._receiving.acquire(blocking=False):
            return  # another thread waits for an answer, so that none is left over
        try:
            while self._num_here <= self._num_sent and self.stream.poll():
                self._arrived.append(self.stream.receive())
        except EndpointError:
            return  # ``receive`` raises it
        finally:
            self._receiving.release()
        if self._num_here > self._num_sent:
            kind = f" of the kind {frames.kind_name(self._arrived[-1])}" if self._arrived else ""
            self._surplus = RemoteProtocolError(
                f"{self._address} sent more answers than there were requests: an answer{kind} came "
                "before its request was sent; dm_env_rpc matches answers by their order alone, "
                "so open a new session, and have the server answer each request once"
            )

    @property
    def _num_here(self) -> int:
        return self._num_received + len(self._arrived)
