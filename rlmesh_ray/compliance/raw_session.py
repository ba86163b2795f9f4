"""RawSession: handshakes and Join streams for checks, frame by frame."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.join_stream import JoinStream
from rlmesh_ray.compliance.findings import ClauseBroken, require
from rlmesh_ray.errors import CodecError, EndpointError, EndpointLostError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.handshake import HandshakeResponse
from rlmesh_ray.protocol.messages import Request, Response

_LEAVE_TIMEOUT_S = 10.0

RequestT = TypeVar("RequestT", bound=Request)
ResponseT = TypeVar("ResponseT", bound=Response)


def call_once(connect_options: ConnectOptions, path: str, data: bytes) -> bytes:
    """Make a unary call on a new connection and return the bytes of its response.

    Raises:
        EndpointError: The call failed.
    """
    channel = connect_options.open()
    try:
        return connect_options.call(channel, path, data)
    finally:
        channel.close()


@contextmanager
def joined(
    connect_options: ConnectOptions,
    service: str,
    offer: bytes,
    parse_handshake_response: Callable[[bytes], HandshakeResponse],
    *,
    is_bare: bool = False,
) -> Iterator[JoinStream]:
    """Open a session as a conforming client does; the stream is cancelled at the end.

    Args:
        connect_options: Connection to the endpoint.
        service: Path of the service, with both slashes.
        offer: Frame of the handshake.
        parse_handshake_response: Decoder of the service's HandshakeResponse.
        is_bare: Whether to omit the session id of the handshake.

    Raises:
        ClauseBroken: The handshake is refused.
    """
    channel = connect_options.open()
    try:
        answer = parse_handshake_response(
            connect_options.call(channel, service + "Handshake", offer)
        )
        require(answer.compatible, f"our own handshake is refused: {answer.error_message!r}")
        session_id = answer.capabilities.get(capabilities.SESSION, "")
        has_id = bool(session_id) and not is_bare
        own = ((capabilities.SESSION_METADATA_KEY, session_id),) if has_id else ()
        stream = JoinStream(
            channel, service + "Join", connect_options.metadata + own, connect_options.address
        )
        try:
            yield stream
        finally:
            stream.close()
    finally:
        channel.close()


class RawSession(Generic[RequestT, ResponseT]):
    """One Join stream.

    Args:
        stream: The stream; not owned.
        pack: Encoder of requests.
        parse: Decoder of responses.
        timeout_s: Timeout of each response.
    """

    def __init__(
        self,
        stream: JoinStream,
        pack: Callable[[RequestT], bytes],
        parse: Callable[[bytes], ResponseT],
        timeout_s: float,
    ) -> None:
        self._stream = stream
        self._timeout_s = timeout_s
        self._pack = pack
        self._parse = parse
        self._ids = (f"check-{number}" for number in itertools.count(1))
        self.has_ended = False
        """Whether the end of the stream has been seen."""
        self.last_frame = b""
        """The last received frame."""

    def new_id(self) -> str:
        """Return a new request id."""
        return next(self._ids)

    def send(self, request: RequestT) -> None:
        """Send a request without waiting."""
        self._stream.send(self._pack(request))

    def send_frame(self, frame: bytes) -> None:
        """Send any bytes."""
        self._stream.send(frame)

    def receive(self) -> ResponseT:
        """Return the next response.

        Raises:
            EndpointError: There was none in time, or the stream ended.
            ClauseBroken: The frame is no response.
        """
        self.last_frame = self._stream.receive(self._timeout_s)
        try:
            return self._parse(self.last_frame)
        except CodecError as error:
            raise ClauseBroken(f"a frame is no response: {error}") from error

    def leave(self, close: RequestT) -> None:
        """Send ``close`` and wait for the end of the stream; responses are ignored."""
        self._timeout_s = min(self._timeout_s, _LEAVE_TIMEOUT_S)
        with suppress(EndpointError, ClauseBroken):
            if not self.has_ended:
                self.send(close)
                self.until_end()

    def until_end(self) -> list[ResponseT]:
        """Return the responses up to the end of the stream."""
        responses = []
        try:
            while True:
                responses.append(self.receive())
        except EndpointLostError as error:
            self.has_ended = True
            # A stream that breaks has gRPC's error as the cause, one that ends has none.
            if error.__cause__ is not None:
                raise
            return responses

    def ask(self, request: RequestT) -> ResponseT:
        """Send ``request``; return the next response, which must be the one to it."""
        self.send(request)
        response = self.receive()
        require(
            response.request_id == request.request_id,
            f"the response to {type(request).__name__} has request_id {response.request_id!r}, "
            f"not {request.request_id!r}",
        )
        return response
