"""Subject and RawSession: handshakes, Shutdown and Join streams of an endpoint under test."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar

from google.protobuf.message import DecodeError

from rlmesh_ray import __version__
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.join_stream import JoinStream, open_call
from rlmesh_ray.compliance.checks import ClauseBroken, require
from rlmesh_ray.errors import CodecError, EndpointError, EndpointLostError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.handshake import (
    HandshakeRequest,
    HandshakeResponse,
    make_handshake_request,
)
from rlmesh_ray.protocol.messages import Request, Response
from rlmesh_ray.wire._pb.rlmesh.env.v1 import service_pb2 as pb

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


@dataclass
class Subject:
    """An endpoint under test: its handshakes and Shutdown."""

    connect_options: ConnectOptions
    may_ask_shutdown: bool = field(default=False, kw_only=True)
    """Whether Shutdown, and to a model also Close, may be sent; either may end the server."""
    answer_timeout_s: float = field(default=60.0, kw_only=True)
    """Timeout of each response; longer than any deadline that a check sets."""
    offered: Mapping[str, str] = field(
        default_factory=lambda: {capabilities.SPACES_CORE: ""}, kw_only=True
    )
    """Capabilities of the sessions' handshakes."""
    is_shut_down: bool = field(default=False, init=False)
    """Whether a Shutdown has been accepted: the endpoint is gone then."""
    service: ClassVar[str]
    """Path of the service, with both slashes."""
    wire: ClassVar[Any]
    """Module with the frames of the service."""

    def shake_hands(self, **changes: Any) -> HandshakeResponse:
        answer: HandshakeResponse = self.wire.parse_handshake_response(self._handshake(changes))
        return answer

    def has_contract(self, **changes: Any) -> bool:
        """Return whether the answer to such an offer has field 6, a contract, even in a refusal."""
        try:
            reply = pb.HandshakeResponse.FromString(self._handshake(changes))
        except DecodeError as error:
            raise ClauseBroken(f"the answer to the handshake does not decode: {error}") from error
        return reply.HasField("env_contract")

    def offer(self, **changes: Any) -> HandshakeRequest:
        own = make_handshake_request(
            "rlmesh-ray check", __version__, self.offered, text=self.connect_options.text_sha256
        )
        return replace(own, **changes)

    def ask_shutdown(self) -> tuple[bool, str]:
        """Send Shutdown; return whether it was accepted, and the message."""
        frame = self.wire.pack_shutdown_request("rlmesh-ray check")
        reply = call_once(self.connect_options, self.service + "Shutdown", frame)
        response = self.wire.parse_shutdown_response(reply)
        self.is_shut_down = response.accepted
        return response.accepted, response.message

    def raw_session(self) -> None:
        raise NotImplementedError

    def _handshake(self, changes: Mapping[str, Any]) -> bytes:
        frame = self.wire.pack_handshake_request(self.offer(**changes))
        return call_once(self.connect_options, self.service + "Handshake", frame)


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
        call = open_call(channel, service + "Join", connect_options.metadata + own)
        stream = JoinStream(call, connect_options.address)
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
        return next(self._ids)

    def send(self, request: RequestT) -> None:
        """Send a request without waiting."""
        self._stream.send(self._pack(request))

    def send_frame(self, frame: bytes) -> None:
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
