"""Protobuf's packed integers as whole arrays."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.wire.protobuf import varint

_LONGEST = 10  # bytes of a varint
_SHIFTS = np.arange(_LONGEST, dtype=np.uint64) * np.uint64(7)
_POSITIONS = np.arange(_LONGEST)
_ALL_BITS = 2**64 - 1
_SEVEN_BITS = np.uint64(0x7F)


def encode_varints(values: NDArray[Any]) -> bytes:
    """Return integers of any dtype, flat, as a packed repeated field holds them."""
    if not values.size:
        return b""
    if values.size == 1:
        return varint(int(values.flat[0]) & _ALL_BITS)
    wide = (
        values.astype(np.int64, copy=False).view(np.uint64)
        if values.dtype.kind == "i"
        else (values.astype(np.uint64, copy=False))
    )
    if np.maximum.reduce(wide) < 0x80:
        return wide.astype(np.uint8).tobytes()
    groups = wide[:, None] >> _SHIFTS
    # All but the first group count only if anything is left there.
    lengths = 1 + np.count_nonzero(groups[:, 1:], axis=1)
    more = lengths[:, None] - 1 > _POSITIONS
    octets = ((groups & _SEVEN_BITS).astype(np.uint8)) | (more.astype(np.uint8) << 7)
    return bytes(octets[lengths[:, None] > _POSITIONS].tobytes())


def decode_varints(data: bytes | memoryview, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the integers of a packed repeated field, as protobuf itself writes it.

    Args:
        data: What the field holds; ends with a whole integer.
        dtype: Of the field: int32, int64, uint32 or uint64.
    """
    octets = np.frombuffer(data, np.uint8)
    if not octets.size:
        return np.zeros(0, dtype)
    if np.maximum.reduce(octets) < 0x80:
        return octets.astype(dtype)
    ends = np.flatnonzero(octets < 0x80)
    starts = np.concatenate(([0], ends[:-1] + 1))
    positions = np.arange(len(octets)) - np.repeat(starts, ends - starts + 1)
    groups = (octets & 0x7F).astype(np.uint64) << (7 * positions).astype(np.uint64)
    wide = np.bitwise_or.reduceat(groups, starts)
    # Negative integers of 32 bits are written with 64.
    return wide.view(np.int64).astype(dtype) if dtype.kind == "i" else wide.astype(dtype)
