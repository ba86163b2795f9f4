"""One Process stream with a dm_env_rpc server: requests out, answers in, in order."""

import threading
import time

from rlmesh_ray.client.channel import Dial
from rlmesh_ray.client.dm_env_rpc import frames
from rlmesh_ray.client.dm_env_rpc.frames import Answer, Kind
from rlmesh_ray.client.join_stream import JoinStream
from rlmesh_ray.errors import (
    EndpointTimeoutError,
    EndpointUnreachableError,
    RemoteProtocolError,
)
from rlmesh_ray.rpc import grpc

_PROCESS = "/dm_env_rpc.v1.Environment/Process"


class WorldStream:
    """A stream on a connection of its own: some servers know their clients by their connections.

    Args:
        dial: The server.
    """

    def __init__(self, dial: Dial) -> None:
        self._channel = dial.open()
        self._stream = JoinStream(self._channel, _PROCESS, dial.metadata, dial.address)
        self._address = dial.address
        # Two counts, since two threads change them.
        self._num_sent = 0
        self._num_received = 0
        self._receiving = threading.Lock()

    def send(self, frame: bytes) -> None:
        """Send a request without waiting.

        Raises:
            EndpointClosedError: The stream was closed.
        """
        self._stream.send(frame)
        self._num_sent += 1

    def receive(self, kind: Kind, end_s: float) -> Answer:
        """Wait for the answer to the oldest request.

        Args:
            kind: Of the request.
            end_s: When to stop waiting, in seconds of time.monotonic().

        Raises:
            RemoteEnvError: The server refused; nothing has changed.
            RemoteProtocolError: That is no answer to it.
            EndpointError: The stream broke, or no answer came in time; it is gone.
        """
        answer = frames.parse_answer(self._next_frame(end_s))
        if answer.kind is not kind:
            raise RemoteProtocolError(
                f"a request of the kind {kind.value} was answered with {answer.kind.value}"
            )
        return answer

    def drain(self, end_s: float) -> None:
        """Wait until everything is answered, however.

        Args:
            end_s: As of ``receive``.

        Raises:
            EndpointError: The stream broke, or not all answers came in time; it is gone.
        """
        while self._num_received < self._num_sent:
            self._next_frame(end_s)

    def close(self) -> None:
        """Cut the stream. Idempotent."""
        self._stream.close()
        self._channel.close()

    def _told(self, error: EndpointUnreachableError) -> EndpointUnreachableError:
        cause = error.__cause__
        if not isinstance(cause, grpc.Call) or cause.code() is not grpc.StatusCode.UNIMPLEMENTED:
            return error
        return EndpointUnreachableError(
            "something listens there, but does not speak dm_env_rpc; an endpoint of this package "
            "does where it is installed with its extra: pip install 'rlmesh-ray[dm-env-rpc]'; "
            "without it, leave out dm_env_rpc://",
            self._address,
        )

    def _next_frame(self, end_s: float) -> bytes:
        # Who ends a session may do so while another thread waits for an answer, and gRPC bears one
        # at a time.
        if not self._receiving.acquire(timeout=max(0.0, end_s - time.monotonic())):
            raise EndpointTimeoutError("another thread still waits for an answer", self._address)
        try:
            frame = self._stream.receive(max(0.0, end_s - time.monotonic()))
            self._num_received += 1
        except EndpointUnreachableError as error:
            raise self._told(error) from error.__cause__
        finally:
            self._receiving.release()
        return frame
