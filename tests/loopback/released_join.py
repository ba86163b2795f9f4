"""A client of generation rlmesh-wire-v1, made of nothing but frames."""

from itertools import count
from types import TracebackType
from typing import Any, Self

from rlmesh_ray.dialects.released.protocol import make_released_offer
from rlmesh_ray.dialects.released.wire import env as wire
from rlmesh_ray.protocol.capabilities import EDITION_NAME
from rlmesh_ray.protocol.handshake import HandshakeResponse
from rlmesh_ray.protocol.messages import Configure, EnvRequest, EnvResponse, Reset, Step
from tests.loopback.ports import plain_channel
from tests.loopback.raw_join import ENV_JOIN, RawJoin

ENV_HANDSHAKE = "/rlmesh.env.v1.EnvService/Handshake"
LONG_MS = 60_000


def shake_hands(address: str, token: str | None = None) -> HandshakeResponse:
    """Return what an environment's endpoint answers to the handshake."""
    offer = wire.HANDSHAKE.pack_request(make_released_offer("test", "0", {}))
    metadata = None if token is None else (("authorization", token),)
    with plain_channel(address) as channel:
        call = channel.unary_unary(ENV_HANDSHAKE)
        return wire.HANDSHAKE.parse_response(call(offer, timeout=LONG_MS / 1000, metadata=metadata))


class ReleasedJoin:
    """One session with an environment.

    Args:
        address: Of the endpoint.
        configure: Whether to name the edition at once, as clients do.
        token: What to show, alone.
    """

    def __init__(self, address: str, *, configure: bool = True, token: str | None = None) -> None:
        self._channel = plain_channel(address)
        self._stream = RawJoin(self._channel, ENV_JOIN, token)
        self._ids = count(1)
        if configure:
            self.ask(Configure(self.next_id(), EDITION_NAME))

    def next_id(self) -> str:
        """Return the id of another request."""
        return f"grpc-req-{next(self._ids)}"

    def send(self, *requests: EnvRequest) -> None:
        """Send ``requests``; do not wait."""
        self._stream.send([wire.pack_request(request) for request in requests])

    def receive(self) -> EnvResponse | None:
        """Return the next response; None: the stream has ended properly."""
        frame = self._stream.receive()
        return None if frame is None else wire.parse_response(frame)

    def ask(self, request: EnvRequest) -> Any:
        """Send ``request`` and return its response, which must be there."""
        response = wire.parse_response(self.ask_frame(wire.pack_request(request)))
        assert response.request_id == request.request_id
        return response

    def ask_frame(self, frame: bytes) -> bytes:
        """Send a frame and return that of its answer."""
        return self._stream.ask(frame)

    def reset(self, *seeds: int, lanes: tuple[int, ...] = (), ids: tuple[str, ...] = ()) -> Any:
        """Reset; return the response."""
        return self.ask(Reset(self.next_id(), seeds, {}, LONG_MS, lanes, ids))

    def step(self, action: bytes, *, lanes: tuple[int, ...] = (), ids: tuple[str, ...] = ()) -> Any:
        """Step; return the response."""
        return self.ask(Step(self.next_id(), action, LONG_MS, lanes, ids))

    def close(self) -> None:
        """Leave, without Close."""
        self._stream.close()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
