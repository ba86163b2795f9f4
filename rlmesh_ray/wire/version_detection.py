"""Which generation a client speaks, from the first thing that it says.

The generations share their paths and no message. What makes no sense in either counts as
``rlmesh.protocol.v1``, which then refuses it in its own way.
"""

from collections.abc import Iterator

from rlmesh_ray.protocol.versions import PROTOCOL_V1, WIRE_V1

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
# Numbers of fields that the first request of a stream has in WIRE_V1 only: request_id, and the
# kinds that the other generation does not know.
_WIRE_V1_ONLY = frozenset({5, 6, 7})
_MOST_FIELDS = 64


def generation_of_handshake(data: bytes) -> str:
    """Return the generation of a ``HandshakeRequest``.

    Its first field is the generation's name in one, in the other a message that begins with it.
    """
    return WIRE_V1 if _first_is_message(data) else PROTOCOL_V1


def generation_of_shutdown(data: bytes) -> str:
    """Return the generation of a ``ShutdownRequest``: its only field is a text or a message."""
    return WIRE_V1 if _first_is_message(data) else PROTOCOL_V1


def generation_of_request(data: bytes) -> str:
    """Return the generation of a ``JoinRequest`` to an environment or a policy."""
    is_wire_v1 = any(number in _WIRE_V1_ONLY for number, _ in _fields(data))
    return WIRE_V1 if is_wire_v1 else PROTOCOL_V1


def _first_is_message(data: bytes) -> bool:
    number, value = next(_fields(data), (0, None))
    if number != 1 or value is None:
        return False
    # No name of a generation, and no reason that anybody would write, begins with a control
    # character; the tags of the message's first fields are such. An empty field was written by
    # somebody whose field is a message: empty texts are left out.
    return not value or value[0] < 0x20


def _fields(data: bytes) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number of each field, and its value if it has a length; stop at nonsense."""
    at = 0
    for _ in range(_MOST_FIELDS):
        tag, at = _varint(data, at)
        if tag is None:
            return
        number, kind = tag >> 3, tag & 7
        if kind == _BYTES:
            size, at = _varint(data, at)
            if size is None or at + size > len(data):
                return
            yield number, data[at : at + min(size, 1)]
            at += size
        elif kind == _VARINT:
            value, at = _varint(data, at)
            if value is None:
                return
            yield number, None
        elif kind in _FIXED_BYTES:
            at += _FIXED_BYTES[kind]
            yield number, None
        else:
            return


def _varint(data: bytes, at: int) -> tuple[int | None, int]:
    """Return the integer at ``at`` (None: there is none), and where it ends."""
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            return None, at
        part = data[at]
        at += 1
        number |= (part & 0x7F) << shift
        if part < 0x80:
            return number, at
    return None, at
