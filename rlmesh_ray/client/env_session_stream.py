"""The requests and answers of one session with an EnvService, and its end."""

import contextlib
import sys
import threading
import time

from rlmesh_ray.client.env_dialect import EnvClientFrames
from rlmesh_ray.client.fork_guard import ForkGuard
from rlmesh_ray.client.join_stream import JoinStream
from rlmesh_ray.errors import CodecError, EndpointError, RlmeshError
from rlmesh_ray.protocol.capabilities import NDARRAY
from rlmesh_ray.protocol.client_session import (
    EnvClientSession,
    Limit,
    ResponseT,
    allowance_s,
    name_limit,
)
from rlmesh_ray.protocol.messages import Close, EnvRequest
from rlmesh_ray.transport.exactly_once import ClientSide

_CLOSE_TIMEOUT_S = 2.0
_CUT_OFF_TIMEOUT_S = 1.0


class EnvSessionStream:
    """The Join stream of one session: one thread sends, one receives.

    Args:
        stream: The stream; closed with the session.
        frames: How the session's dialect encodes messages.
        session: What may be sent, and what replies mean.
        max_bytes: The largest request that the endpoint accepts.
    """

    def __init__(
        self,
        stream: JoinStream,
        frames: EnvClientFrames,
        session: EnvClientSession,
        max_bytes: int,
    ) -> None:
        self.session = session
        self.numbers = ClientSide()
        """Numbers of the requests."""
        self._stream = stream
        self._frames = frames
        self._process = ForkGuard(session.address)
        self._tag_arrays = NDARRAY in session.capabilities
        self._max_bytes = max_bytes
        self._is_closed = False

    @property
    def next_id(self) -> str:
        """Id of the next request that is sent."""
        return str(self.numbers.next_number)

    @property
    def is_own(self) -> bool:
        """Whether this process has opened it; a fork cannot use it, or even close it."""
        return self._process.is_owner

    def require_own(self) -> None:
        """Make sure that this process has opened the session.

        Raises:
            EndpointLostError: This process is a fork of the one that has.
        """
        self._process.require()

    def require_open(self) -> None:
        """Make sure that the session may be used; raises EndpointError if not."""
        self.require_own()
        self.session.require_open()

    def send(self, request: EnvRequest) -> None:
        """Send a request without waiting.

        Raises:
            CodecError: Something in the request would not arrive as it is; nothing was sent.
            EndpointError: The session is closed, or an error has ended it.
        """
        self.require_open()
        frame = self._pack(request)
        try:
            self._stream.send(frame)
            self.session.num_sent += 1
            if request.request_id == self.next_id:  # else it was sent on a direct connection before
                self.numbers.sent()
        except BaseException as error:
            self.session.fail_if_interrupted(error)
            raise

    def receive(
        self,
        request_id: str,
        kind: type[ResponseT],
        limit: Limit,
        left_s: float | None = None,
    ) -> ResponseT:
        """Wait for the answer to the oldest request that was sent.

        Args:
            request_id: Id of the request.
            kind: Type of the answer.
            limit: What limits the request; a timeout names it. See ``allowance_s``.
            left_s: What is left of that; None: all.

        Raises:
            RemoteEnvError: The endpoint answered with an error; one that it does not call
                recoverable ends the session.
            RemoteProtocolError: The answer breaks the protocol; that ends the session.
            EndpointError: The session broke or is over, or is another process's.
        """
        self.require_open()
        try:
            wait_s = limit.seconds if left_s is None else left_s
            frame = self._stream.receive(wait_s + allowance_s(limit.seconds))
            self.session.num_received += 1
            return self.read(frame, request_id, kind)
        except RlmeshError as error:
            name_limit(error, limit, left_s)
            if isinstance(error, EndpointError):
                self.session.fail(error)
            if self.session.has_failed:
                self._stream.close()
            raise
        except BaseException as error:
            self.session.fail_if_interrupted(error)
            raise

    def read(self, frame: bytes, request_id: str, kind: type[ResponseT]) -> ResponseT:
        """Return the answer in ``frame``, from the stream or a direct connection.

        Args:
            frame: Bytes of the answer.
            request_id: Id of the request.
            kind: Type of the answer.

        Raises:
            RemoteEnvError: As with ``receive``.
            RemoteProtocolError: As with ``receive``.
        """
        try:
            response = self._frames.parse_response(frame)
        except CodecError as error:
            raise self.session.broken(f"the answer does not decode: {error}", request_id) from error
        return self.session.accept(response, request_id, kind)

    def _pack(self, request: EnvRequest) -> bytes:
        return self._frames.pack_request(
            request, tag_arrays=self._tag_arrays, max_bytes=self._max_bytes
        )

    def close(self) -> None:
        """End the session. Idempotent; a broken session is closed without a word."""
        has_failed = self.session.has_failed
        self.session.close()
        if self._is_closed or not self.is_own:
            return
        self._is_closed = True
        if sys.is_finalizing():
            return  # gRPC's threads are gone; the endpoint notices the end of the process
        # In a thread of its own: Ctrl-C in the middle of a call can leave gRPC's lock held, and
        # the next thread that needs it would wait for ever.
        closing = threading.Thread(
            target=self._send_close_and_end, name="rlmesh-ray-close", daemon=True
        )
        try:
            closing.start()
        except RuntimeError:  # from Python 3.12 on no thread starts while the process ends
            if not has_failed:
                self._send_close_and_end()
        else:
            closing.join(_CLOSE_TIMEOUT_S + _CUT_OFF_TIMEOUT_S)

    def _send_close_and_end(self) -> None:
        with contextlib.suppress(Exception):  # a broken session is closed as well
            self._finish(Close(self.next_id))
        self._stream.close()

    def _finish(self, request: Close) -> None:
        """Send Close and wait for its answer, past the unread answers of earlier requests."""
        self._stream.send(self._pack(request))
        end_s = time.monotonic() + _CLOSE_TIMEOUT_S
        is_answered = False
        while not is_answered:
            frame = self._stream.receive(max(0.0, end_s - time.monotonic()))
            is_answered = self._frames.parse_response(frame).request_id == request.request_id
