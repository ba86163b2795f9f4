"""Detection of ``rlmesh-wire-v1`` in the first frame of a call.

It has the gRPC paths of ``rlmesh.protocol.v1``, and other messages. A frame that is malformed in
both of them counts as the latter's, whose service refuses it.
"""

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
# Field numbers that the first request of a stream has in this dialect only: request_id, and the
# kinds of requests that rlmesh.protocol.v1 does not have.
_OWN_FIELDS = frozenset({5, 6, 7})
_MOST_FIELDS = 64


def is_handshake(data: bytes) -> bool:
    """Return whether a ``HandshakeRequest`` or a ``ShutdownRequest`` is this dialect's.

    Its first field is a message; in ``rlmesh.protocol.v1`` it is the name of the generation or the
    reason of the shutdown.
    """
    number, value = next(_fields(data), (0, None))
    if number != 1 or value is None:
        return False
    # A name or a reason does not begin with a control character; the tags of the message's first
    # fields do. An empty value is a message, too: protobuf leaves out empty texts.
    return not value or value[0] < 0x20


is_shutdown = is_handshake


def is_request(data: bytes) -> bool:
    """Return whether a ``JoinRequest`` to an environment or a policy is this dialect's."""
    return any(number in _OWN_FIELDS for number, _ in _fields(data))


def _fields(data: bytes) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number of each field, and the first byte of its value where that has a length.

    Stops at bytes that are no field.
    """
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
    """Return the integer at ``at``, None where there is none, and where it ends."""
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
