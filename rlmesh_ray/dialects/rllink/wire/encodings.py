"""Encodings of RLlink, and their detection from the first byte of a body."""

from collections.abc import Callable
from dataclasses import dataclass

from rlmesh_ray.dialects.rllink.wire import json_encoding, ray_encoding
from rlmesh_ray.dialects.rllink.wire import messages as m
from rlmesh_ray.errors import CodecError


@dataclass(frozen=True, slots=True)
class Encoding:
    """How messages are written."""

    name: str
    parse_request: Callable[[bytes], m.Request]
    pack_reply: Callable[[m.Reply], bytes]
    pack_request: Callable[[m.Request], bytes]
    parse_reply: Callable[[bytes], m.Reply]


JSON = Encoding(
    "JSON",
    json_encoding.parse_request,
    json_encoding.pack_reply,
    json_encoding.pack_request,
    json_encoding.parse_reply,
)
RAY = Encoding(
    "Ray",
    ray_encoding.parse_request,
    ray_encoding.pack_reply,
    ray_encoding.pack_request,
    ray_encoding.parse_reply,
)


def encoding_of(body: bytes) -> Encoding:
    """Return the encoding of a body.

    Raises:
        CodecError: It is neither.
    """
    if body[:1] == b"{":
        return JSON
    if ray_encoding.begins(body):
        return RAY
    raise CodecError(f"a message that begins with {body[:1]!r} is of no dialect of RLlink")
