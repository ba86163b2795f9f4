"""Decoding of JoinRequest and JoinResponse: frames with a request id and a oneof ``kind``."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message

from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.messages import MalformedRequest
from rlmesh_ray.wire.protobuf import parse

T = TypeVar("T")
Readers = Mapping[str, Callable[[Any], T]]
"""Decoder of each kind of message, by the name of its field in the oneof."""


def read_request(frame: type[Message], readers: Readers[T], data: bytes) -> T | MalformedRequest:
    """Return the request in ``data``. Never raises: every frame gets an in-band response.

    Args:
        frame: The message class, with ``request_id`` and the oneof ``kind``.
        readers: Decoders, which may raise CodecError.
        data: Bytes from the peer.
    """
    try:
        message: Any = parse(frame, data)
    except CodecError as error:
        return MalformedRequest("", str(error))
    kind = message.WhichOneof("kind")
    if kind is None:
        return MalformedRequest(message.request_id, "the frame holds no kind of request known here")
    try:
        return readers[kind](message)
    except CodecError as error:
        return MalformedRequest(message.request_id, f"{kind}: {error}")


def read_response(frame: type[Message], readers: Readers[T], data: bytes) -> T:
    """Return the response in ``data``; arguments as for ``read_request``.

    Raises:
        CodecError: ``data`` is no response, or one of an unknown kind.
    """
    # Infos may have very many values, and the client has chosen the server.
    message: Any = parse(frame, data, most_parts=None)
    kind = message.WhichOneof("kind")
    if kind is None:
        raise CodecError("the frame holds no kind of response known here")
    return readers[kind](message)
