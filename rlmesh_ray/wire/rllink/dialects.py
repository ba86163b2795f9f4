"""Which dialect a peer speaks, told by the first byte of what it says."""

from collections.abc import Callable
from dataclasses import dataclass

from rlmesh_ray.errors import CodecError
from rlmesh_ray.wire.rllink import json_dialect, ray_dialect
from rlmesh_ray.wire.rllink import messages as m


@dataclass(frozen=True, slots=True)
class Dialect:
    """How messages are written."""

    name: str
    parse_request: Callable[[bytes], m.Request]
    pack_reply: Callable[[m.Reply], bytes]
    pack_request: Callable[[m.Request], bytes]
    parse_reply: Callable[[bytes], m.Reply]


JSON = Dialect(
    "JSON",
    json_dialect.parse_request,
    json_dialect.pack_reply,
    json_dialect.pack_request,
    json_dialect.parse_reply,
)
RAY = Dialect(
    "Ray",
    ray_dialect.parse_request,
    ray_dialect.pack_reply,
    ray_dialect.pack_request,
    ray_dialect.parse_reply,
)


def dialect_of(body: bytes) -> Dialect:
    """Return the dialect of a body.

    Raises:
        CodecError: It is neither.
    """
    if body[:1] == b"{":
        return JSON
    if ray_dialect.begins(body):
        return RAY
    raise CodecError(f"a message that begins with {body[:1]!r} is of no dialect of RLlink")
