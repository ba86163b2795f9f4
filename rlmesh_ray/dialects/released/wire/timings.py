"""Timings of a request, in fields that are appended to a frame; for both services."""

from collections.abc import Iterable

from rlmesh_ray.wire.protobuf import varint


def with_numbers(frame: bytes, numbers: Iterable[tuple[int, int | None]]) -> bytes:
    """Return ``frame`` with more fields of unsigned integers.

    Args:
        frame: A message, which may go on after its end.
        numbers: Each field's number, and its value; None: it is left out.
    """
    tail = [
        varint(field << 3) + varint(max(number, 0))
        for field, number in numbers
        if number is not None
    ]
    return b"".join([frame, *tail])
