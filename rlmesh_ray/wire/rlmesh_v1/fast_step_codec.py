"""Hand-written codec of Step frames, faster than the generated protobuf code.

Encoding gives the same message as the generated code. Decoding handles the usual responses; others
(fields in another order, unknown fields, infos) raise FastCodecMiss, and the generated code decodes
them. Requests have so few fields that the generated code is as fast.
"""

import struct
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache

from rlmesh_ray.protocol.messages import Step, StepDone
from rlmesh_ray.wire.protobuf import (
    FastCodecMiss,
    field,
    last_text,
    length_at,
    value_at,
    value_head,
    varint,
)

_CACHED_BYTES = 2**16
"""Larger ids are not cached, since the peer chooses them."""


def pack_step(request: Step) -> bytes:
    """Return the frame of ``request``, without lanes and with a deadline of 0 or more.

    Raises:
        ValueError: The request id has no UTF-8 form.
    """
    head, tail = _around_action(len(request.action), request.timeout_ms)
    request_id = field(b"\x52", request.request_id.encode())  # JoinRequest.request_id
    return b"%b%b%b%b" % (head, request.action, tail, request_id)


@lru_cache(maxsize=64)
def _around_action(size: int, timeout_ms: int) -> tuple[bytes, bytes]:
    head = value_head(b"\x0a", size)  # StepRequest.action
    tail = b"\x10" + varint(timeout_ms)  # StepRequest.timeout_ms
    return b"\x12" + varint(len(head) + size + len(tail)) + head, tail  # JoinRequest.step


def pack_step_done(response: StepDone, extras: bytes) -> bytes:
    """Return the frame of ``response``.

    Args:
        response: The response; its infos and completed episodes are not encoded here.
        extras: Its infos and completed episodes, as encoded fields of a ``StepResponse``.
    """
    observation, rewards = response.observation, _packed_doubles(response.rewards)
    terminated, truncated = response.terminated, response.truncated
    rest = extras + _pack_ids(response.episode_ids)
    sizes = (len(observation), len(rewards), len(terminated), len(truncated))
    heads = _step_done_heads(sizes, len(rest))
    request_id = field(b"\xaa\x01", response.request_id.encode())  # JoinResponse.request_id
    # A single join allocates once: an observation may have megabytes.
    return b"".join(
        (
            heads[0],
            observation,
            heads[1],
            rewards,
            heads[2],
            terminated,
            heads[3],
            truncated,
            rest,
            request_id,
        )
    )


@lru_cache(maxsize=64)
def _step_done_heads(sizes: tuple[int, ...], rest: int) -> tuple[bytes, ...]:
    """Return the tags and lengths before the first four fields; ``rest`` is the others' size."""
    first = value_head(b"\x0a", sizes[0])  # StepResponse.observation
    tags = (b"\x12", b"\x1a", b"\x22")  # .rewards, .terminated_mask, .truncated_mask
    others = [
        tag + varint(size) if size else b"" for tag, size in zip(tags, sizes[1:], strict=True)
    ]
    size = len(first) + sum(map(len, others)) + sum(sizes) + rest
    return (b"\x12" + varint(size) + first, *others)  # JoinResponse.step


# The ids of all lanes stay the same for many steps.
@lru_cache(maxsize=32)
def _pack_ids(episode_ids: tuple[str, ...]) -> bytes:
    ids = [each.encode() for each in episode_ids]
    return b"".join([b"\x3a%b%b" % (varint(len(each)), each) for each in ids])


def parse_step_done(data: bytes) -> StepDone:
    """Return the response in ``data``.

    Raises:
        FastCodecMiss: The generated code has to decode it.
    """
    try:
        if data[0] != 0x12:
            raise FastCodecMiss
        size, at = length_at(data, 1)
        end = at + size
        start, at = value_at(data, at, 0x0A)
        observation = data[start:at]
        rewards, at = _bytes_at(data, at, end, 0x12)
        terminated, at = _bytes_at(data, at, end, 0x1A)
        truncated, at = _bytes_at(data, at, end, 0x22)
        if at > end or len(rewards) % 8:
            raise FastCodecMiss
        read_ids = _parse_ids if end - at <= _CACHED_BYTES else _parse_ids.__wrapped__
        return StepDone(
            last_text(data, end, b"\xaa\x01"),
            observation,
            as_doubles(rewards),
            as_flags(terminated),
            as_flags(truncated),
            {},
            (),
            read_ids(data[at:end]),
        )
    except (IndexError, UnicodeDecodeError) as error:
        raise FastCodecMiss from error


def _bytes_at(data: bytes, at: int, end: int, tag: int) -> tuple[bytes, int]:
    """Return the bytes of the field ``tag`` if it is at ``at``, and the position after it."""
    if at >= end or data[at] != tag:
        return b"", at
    size, at = length_at(data, at + 1)
    return data[at : at + size], at + size


@lru_cache(maxsize=32)
def _parse_ids(data: bytes) -> tuple[str, ...]:
    ids, at = [], 0
    while at < len(data):
        if data[at] != 0x3A:
            raise FastCodecMiss
        size, at = length_at(data, at + 1)
        ids.append(data[at : at + size].decode())
        at += size
    if at != len(data):
        raise FastCodecMiss
    return tuple(ids)


def _packed_doubles(numbers: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(numbers)}d", *numbers)


def as_doubles(data: bytes) -> "array[float]":
    """Return the little-endian doubles in ``data``."""
    numbers = array("d", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def as_flags(mask: bytes) -> bytes:
    """Return ``mask`` with 1 for each nonzero byte, as NumPy bools must be 0 or 1."""
    return bytes(map(bool, mask)) if mask.strip(b"\x00\x01") else mask
