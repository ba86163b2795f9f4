"""Frames: eight ASCII digits that say how long the body is, and the body.

The digits are read strictly: no sign, no spaces, no underscores, no digits of other alphabets,
all of which ``int`` would take.
"""

from rlmesh_ray.errors import CodecError

HEADER_BYTES = 8
MOST_BODY_BYTES = 99_999_999
"""The largest number of eight digits; Ray's own sender writes a ninth, which breaks the stream."""


def framed(body: bytes) -> bytes:
    """Return ``body`` behind its header.

    Raises:
        CodecError: It is too long for the header.
    """
    if len(body) > MOST_BODY_BYTES:
        raise CodecError(
            f"a message of {len(body)} bytes does not fit RLlink's header of eight digits; "
            "send fewer steps at once"
        )
    return b"%08d" % len(body) + body


def body_bytes(header: bytes, limit: int = MOST_BODY_BYTES) -> int:
    """Return how long the body behind ``header`` is.

    Args:
        header: Eight bytes.
        limit: Most bytes that are accepted.

    Raises:
        CodecError: They are not eight digits, or the body would be empty or above ``limit``.
    """
    # Of bytes, isdigit knows the ASCII digits alone.
    if len(header) != HEADER_BYTES or not header.isdigit():
        raise CodecError(f"{header[:HEADER_BYTES]!r} is no header of RLlink: eight digits")
    size = int(header)
    if not 0 < size <= limit:
        raise CodecError(f"a message of {size} bytes, where 1 to {limit} are accepted")
    return size
