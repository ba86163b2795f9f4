"""Requests and answers of one session with an EnvService, and how they end."""

import contextlib
import re
import sys
import threading
import time
from typing import TypeVar

from rlmesh_ray.client.env_dialect import EnvClientFrames
from rlmesh_ray.client.fork_guard import ForkGuard
from rlmesh_ray.client.join_stream import JoinStream
from rlmesh_ray.errors import (
    CodecError,
    EndpointClosedError,
    EndpointLostError,
    RemoteEnvError,
    RemoteProtocolError,
    RlmeshError,
)
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol.handshake import quoted
from rlmesh_ray.protocol.messages import (
    Close,
    Configured,
    EnvFailed,
    EnvRequest,
    Rendered,
    ResetDone,
    StepDone,
)
from rlmesh_ray.transport.exactly_once import ClientSide

_CLOSE_TIMEOUT_S = 2.0
_CUT_OFF_TIMEOUT_S = 1.0

ResponseT = TypeVar("ResponseT", Configured, ResetDone, StepDone, Rendered)


def endpoint_timeout_ms(timeout_s: float) -> int:
    """Return how long the endpoint may take: less than its client waits, to be heard in time."""
    return max(1, int(timeout_s * 900))


def with_client_timeout(message: str, timeout_ms: int, timeout_s: float) -> str:
    """Return an endpoint's message with the limit that the user has set.

    Args:
        message: Names the limit that the endpoint was given, where it is about that.
        timeout_ms: That limit.
        timeout_s: The user's; 0: the endpoint was given none.
    """
    if not timeout_s:
        return message
    return re.sub(rf"\b{timeout_ms} ms\b", f"{timeout_s:g} s", message)


class EnvSessionStream:
    """What is asked and answered in one session: one thread sends, one receives.

    Args:
        stream: The session's.
        channel: The stream's; closed with the session.
        frames: The session's language.
        address: For error messages.
    """

    def __init__(
        self, stream: JoinStream, channel: grpc.Channel, frames: EnvClientFrames, address: str
    ) -> None:
        self.numbers = ClientSide()
        """Of the requests."""
        self.num_sent = 0
        """How many requests have been sent."""
        self.num_received = 0
        """How many answers have come; after the first one the endpoint knows the session."""
        self._stream = stream
        self._channel = channel
        self._frames = frames
        self._address = address
        self._process = ForkGuard(address)
        self._is_shut = self._is_closed = False
        self._end: RlmeshError | None = None

    @property
    def next_id(self) -> str:
        """Id of the next request that is sent."""
        return str(self.numbers.next_number)

    @property
    def is_own(self) -> bool:
        """Whether it is this process's; a fork leaves it alone, and cannot even close it."""
        return self._process.is_owner

    def require_own(self) -> None:
        """Make sure that the session is this process's.

        Raises:
            EndpointLostError: It is that of a process of which this one is a fork.
        """
        self._process.require()

    def require_open(self) -> None:
        """Make sure that the session may be used.

        Raises:
            EndpointClosedError: It was closed.
            EndpointLostError: An error has ended it, or it is another process's.
        """
        self.require_own()
        if self._is_shut:
            raise EndpointClosedError("the session is closed", self._address)
        if self._end is not None:
            raise EndpointLostError(
                f"the session ended with an error ({self._end}); close it and open a new one",
                self._address,
            ) from self._end

    def send(self, request: EnvRequest) -> None:
        """Send a request without waiting.

        Raises:
            EndpointError: The session is closed, or an error has ended it.
        """
        self.require_open()
        frame = self._frames.pack_request(request)
        try:
            self._stream.send(frame)
            self.num_sent += 1
            if request.request_id == self.next_id:  # else it had been sent by a direct road
                self.numbers.sent()
        except BaseException as error:
            self.fail_if_interrupted(error)
            raise

    def receive(self, request_id: str, kind: type[ResponseT], timeout_s: float) -> ResponseT:
        """Wait for the answer to the oldest request that was sent.

        Args:
            request_id: The request's.
            kind: Of the answer.
            timeout_s: How long to wait.

        Raises:
            RemoteEnvError: The endpoint answered with an error; one that it does not call
                recoverable ends the session.
            RemoteProtocolError: The answer breaks the protocol; that ends the session.
            EndpointError: The session broke, or is another process's.
        """
        self.require_own()
        try:
            frame = self._stream.receive(timeout_s)
            self.num_received += 1
            return self.read(frame, request_id, kind, timeout_s)
        except BaseException as error:
            self.fail_if_interrupted(error)
            raise

    def read(
        self, frame: bytes, request_id: str, kind: type[ResponseT], timeout_s: float = 0.0
    ) -> ResponseT:
        """Return the answer in ``frame``, wherever that came from.

        Args:
            frame: The answer's.
            request_id: The request's.
            kind: Of the answer.
            timeout_s: That the user has set, if the endpoint was given one for the request.

        Raises:
            RemoteEnvError: As with ``receive``.
            RemoteProtocolError: As with ``receive``.
        """
        try:
            response = self._frames.parse_response(frame)
        except CodecError as error:
            raise self.broken(f"the answer does not decode: {error}", request_id) from error
        if response.request_id != request_id:
            raise self.broken(
                f"the answer is for request {quoted(response.request_id)!r}", request_id
            )
        if isinstance(response, EnvFailed):
            raise self._failed(response, timeout_s)
        if not isinstance(response, kind):
            name = type(response).__name__
            raise self.broken(f"{name} does not answer this request", request_id)
        return response

    def broken(self, reason: str, request_id: str) -> RemoteProtocolError:
        """Let nothing be asked any more, since an answer breaks the protocol; return the error."""
        error = RemoteProtocolError(reason, request_id)
        self.fail(error)
        return error

    def _failed(self, failed: EnvFailed, timeout_s: float) -> RemoteEnvError:
        error = RemoteEnvError(
            failed.code.name,
            with_client_timeout(failed.message, endpoint_timeout_ms(timeout_s), timeout_s),
            failed.is_recoverable,
            failed.debug_info,
            failed.interrupted_episodes,
        )
        if not failed.is_recoverable:
            self.fail(error)
        return error

    def fail(self, error: RlmeshError) -> None:
        """Let nothing be asked any more, because of ``error``."""
        self._end = self._end or error

    def fail_if_interrupted(self, error: BaseException) -> None:
        """Let nothing be asked any more if a request was left in the middle, by Ctrl-C perhaps.

        Whether it has been executed nobody knows, and its answer would be taken for the next one's.
        """
        if not isinstance(error, RlmeshError):
            why = f"{type(error).__name__} came in the middle of a request"
            self.fail(EndpointLostError(why, self._address))

    def shut(self) -> None:
        """Let nothing be asked any more, since the session is about to be closed."""
        self._is_shut = True

    def close(self) -> None:
        """End the session. Idempotent; a broken session is closed without a word."""
        self.shut()
        if self._is_closed or not self.is_own:
            return
        self._is_closed = True
        if sys.is_finalizing():
            return  # gRPC's threads are gone, nothing would ever answer; the process's end is heard
        # In a thread of its own: Ctrl-C in the middle of a call can leave gRPC's lock held, and
        # whoever asks for it next waits for ever.
        goodbye = threading.Thread(target=self._say_goodbye, name="rlmesh-ray-close", daemon=True)
        goodbye.start()
        goodbye.join(_CLOSE_TIMEOUT_S + _CUT_OFF_TIMEOUT_S)

    def _say_goodbye(self) -> None:
        with contextlib.suppress(Exception):  # whatever broke the session, it is closed now
            self._finish(Close(self.next_id))
        self._stream.close()
        self._channel.close()

    def _finish(self, request: Close) -> None:
        """Send Close and wait for its answer, past those of requests that nobody waited for."""
        self._stream.send(self._frames.pack_request(request))
        end_s = time.monotonic() + _CLOSE_TIMEOUT_S
        is_answered = False
        while not is_answered:
            frame = self._stream.receive(max(0.0, end_s - time.monotonic()))
            is_answered = self._frames.parse_response(frame).request_id == request.request_id
