"""What a check says and hears: handshakes and Join streams, frame by frame."""

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
    """Make a unary call on a connection of its own and return the reply's bytes.

    Raises:
        EndpointError: It failed; the class says how.
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
    """Open a session as a conforming client does; the stream is cut off at the end.

    Args:
        connect_options: The endpoint.
        service: Path of the service, with both slashes.
        offer: Frame of the handshake.
        parse_handshake_response: Of the service's dialect.
        is_bare: Whether the session id of the handshake is kept back.

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
        stream: Used, not owned.
        pack: Requests to frames.
        parse: Frames to responses.
        timeout_s: How long any answer may take.
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
        """What came last, as it came."""

    def new_id(self) -> str:
        """Return an id that no request of this session has had."""
        return next(self._ids)

    def send(self, request: RequestT) -> None:
        """Send without waiting."""
        self._stream.send(self._pack(request))

    def send_frame(self, frame: bytes) -> None:
        """Send whatever it is."""
        self._stream.send(frame)

    def receive(self) -> ResponseT:
        """Return the next response.

        Raises:
            EndpointError: None came in time, or the stream ended.
            ClauseBroken: It is no response.
        """
        self.last_frame = self._stream.receive(self._timeout_s)
        try:
            return self._parse(self.last_frame)
        except CodecError as error:
            raise ClauseBroken(f"a frame is no response: {error}") from error

    def leave(self, close: RequestT) -> None:
        """Send ``close`` and wait for the end, whatever comes until then."""
        self._timeout_s = min(self._timeout_s, _LEAVE_TIMEOUT_S)
        with suppress(EndpointError, ClauseBroken):
            if not self.has_ended:
                self.send(close)
                self.until_end()

    def until_end(self) -> list[ResponseT]:
        """Return what still comes, up to the end of the stream."""
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
        """Return the response to ``request``, which must be the next one that comes."""
        self.send(request)
        response = self.receive()
        require(
            response.request_id == request.request_id,
            f"the response to {type(request).__name__} has request_id {response.request_id!r}, "
            f"not {request.request_id!r}",
        )
        return response
