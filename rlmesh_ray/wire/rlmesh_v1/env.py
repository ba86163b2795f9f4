"""The frames of EnvService: conversion between bytes and the messages of ``protocol``."""

import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import Any

from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.messages import (
    Close,
    Closed,
    EnvErrorCode,
    EnvFailed,
    EnvRequest,
    EnvResponse,
    EpisodeRecord,
    MalformedRequest,
    Render,
    Rendered,
    Reset,
    ResetDone,
    Step,
    StepDone,
)
from rlmesh_ray.wire import protobuf
from rlmesh_ray.wire._pb.rlmesh.env.v1 import interaction_pb2 as pb
from rlmesh_ray.wire._pb.rlmesh.env.v1 import service_pb2
from rlmesh_ray.wire._pb.rlmesh.spaces.v1 import meta_pb2
from rlmesh_ray.wire.protobuf import (
    as_utf8,
    few,
    field,
    value_head,
    varint,
)
from rlmesh_ray.wire.rlmesh_v1.handshake import HandshakeFrames
from rlmesh_ray.wire.rlmesh_v1.limits import MAX_MESSAGE_BYTES
from rlmesh_ray.wire.rlmesh_v1.meta import (
    MAX_BYTES,
    InputEncoder,
    MetaBudget,
    decode_meta,
    decode_peer_meta,
    encode_meta,
)

# --- the server's side of Join ---------------------------------------------------------


def pack_response(response: EnvResponse, *, tag_arrays: bool) -> bytes:
    """Return the frame of ``response``; ``tag_arrays``: to a peer with the capability NDARRAY.

    Its infos may take twice the bytes of its observation and 64 MiB more; values beyond that
    become text, since peers accept ``limits.max_response_bytes``.
    """
    if isinstance(response, StepDone):
        has_extras = response.infos or response.completed_episodes
        return pack_step_done(response, _extras(response, tag_arrays) if has_extras else b"")
    message = pb.JoinResponse(request_id=response.request_id)
    match response:
        case ResetDone():
            infos = encode_meta(
                response.infos, tag_arrays=tag_arrays, budget=infos_budget(response)
            )
            message.reset.observation.bytes.data = response.observation
            message.reset.infos.CopyFrom(infos)
            message.reset.episode_ids.extend(response.episode_ids)
        case Rendered(png=png):
            message.render.SetInParent()
            if png is not None:
                message.render.png_frame = png
        case Closed(final_episodes=episodes):
            message.close.SetInParent()
            message.close.final_episodes.extend(_episodes(episodes, tag_arrays))
        case EnvFailed():
            fill_error(
                message.error, response, _episodes(response.interrupted_episodes, tag_arrays)
            )
    return message.SerializeToString()


def _reset(message: pb.JoinRequest) -> Reset:
    body = message.reset
    return Reset(
        message.request_id,
        seeds=few(body.seeds, "seeds"),
        options=decode_peer_meta(body.options),
        timeout_ms=body.timeout_ms,
        env_indices=few(body.env_indices, "lanes"),
    )


def _step(message: pb.JoinRequest) -> Step:
    body = message.step
    action = body.action.bytes.data
    return Step(message.request_id, action, body.timeout_ms, few(body.env_indices, "lanes"))


_REQUESTS: dict[str, Callable[[pb.JoinRequest], EnvRequest]] = {
    "reset": _reset,
    "step": _step,
    "render": lambda message: Render(
        message.request_id, message.render.mask, message.render.timeout_ms
    ),
    "close": lambda message: Close(message.request_id, message.close.reason),
}

parse_request: Callable[[bytes], EnvRequest | MalformedRequest] = partial(
    protobuf.read_request, pb.JoinRequest, _REQUESTS
)
"""Returns the request in a frame. Never raises: every frame gets an in-band response."""


def _extras(response: StepDone, tag_arrays: bool) -> bytes:
    body, budget = pb.StepResponse(), infos_budget(response)
    if response.infos:
        body.infos.CopyFrom(encode_meta(response.infos, tag_arrays=tag_arrays, budget=budget))
    body.completed_episodes.extend(_episodes(response.completed_episodes, tag_arrays, budget))
    return body.SerializeToString()


def infos_budget(response: ResetDone | StepDone) -> MetaBudget:
    return MetaBudget(2 * len(response.observation) + MAX_BYTES)


def fill_error(body: Any, response: EnvFailed, episodes: Iterable[Any]) -> None:
    """Write an error into a message, of this wire or of one with the same fields."""
    body.code = response.code.value
    body.message = as_utf8(response.message)
    body.is_recoverable = response.is_recoverable
    body.debug_info = as_utf8(response.debug_info)
    body.interrupted_episodes.extend(episodes)


def _episodes(
    records: Iterable[EpisodeRecord], tag_arrays: bool, budget: MetaBudget | None = None
) -> list[pb.EpisodeMetadata]:
    budget = budget or MetaBudget()
    return [
        pb.EpisodeMetadata(
            **record_fields(record, tag_arrays, budget),
            duration_ms=(record.end_timestamp_ns - record.start_timestamp_ns) // 1_000_000,
        )
        for record in records
    ]


def record_fields(record: EpisodeRecord, tag_arrays: bool, budget: MetaBudget) -> dict[str, Any]:
    """Return the fields of a record's message, of this wire or of one with the same names."""
    return {
        "episode_id": record.episode_id,
        "seed": record.seed,
        "env_index": record.env_index,
        "step_count": record.step_count,
        "cumulative_reward": record.cumulative_reward,
        "terminated": record.terminated,
        "truncated": record.truncated,
        "start_timestamp_ns": record.start_timestamp_ns,
        "end_timestamp_ns": record.end_timestamp_ns,
        "final_info": encode_meta(record.final_info, tag_arrays=tag_arrays, budget=budget),
    }


# --- the client's side of Join ---------------------------------------------------------


def pack_request(
    request: EnvRequest, *, tag_arrays: bool = True, max_bytes: int = MAX_MESSAGE_BYTES
) -> bytes:
    """Return the frame of ``request``, for a peer that accepts ``max_bytes``.

    Options have arrays only where the peer has the capability NDARRAY (``tag_arrays``). Raises
    CodecError for numbers beyond their fields, options that cannot travel and too large a frame.
    """
    try:
        if (
            isinstance(request, Step)
            and not request.env_indices
            and 0 <= request.timeout_ms < 2**63
        ):
            frame = pack_step(request)
        else:
            frame = _request_message(request, tag_arrays, max_bytes).SerializeToString()
    except (TypeError, ValueError) as error:
        raise CodecError(f"{type(request).__name__} has no wire form: {error}") from error
    if len(frame) > max_bytes:
        raise too_large(request, len(frame), max_bytes)
    return frame


def parse_response(data: bytes) -> EnvResponse:
    try:
        return parse_step_done(data)
    except FastCodecMiss:
        return read_response(data)


def too_large(request: EnvRequest, num_bytes: int, max_bytes: int) -> CodecError:
    remedy = "give shorter text"
    if isinstance(request, Reset) and request.options:
        sizes = {
            options_to_proto({key: value}, tag_arrays=True, max_bytes=max_bytes).ByteSize(): key
            for key, value in request.options.items()
        }
        remedy = f"give less in options[{sizes[max(sizes)]!r:.40}]"
    return CodecError(
        f"{type(request).__name__} has {num_bytes} bytes, and the endpoint takes {max_bytes}; "
        f"{remedy}"
    )


def options_to_proto(
    options: Mapping[str, object], *, tag_arrays: bool, max_bytes: int
) -> meta_pb2.MetaMap:
    message = meta_pb2.MetaMap()
    encoder = InputEncoder("the options", tag_arrays=tag_arrays, max_bytes=max_bytes)
    encoder.fill_map(message, options, "options")
    return message


def _request_message(request: EnvRequest, tag_arrays: bool, max_bytes: int) -> pb.JoinRequest:
    message = pb.JoinRequest(request_id=request.request_id)
    match request:
        case Step(action=action, timeout_ms=timeout_ms, env_indices=env_indices):
            message.step.action.bytes.data = action
            message.step.timeout_ms = timeout_ms
            message.step.env_indices.extend(env_indices)
        case Reset(seeds=seeds, options=options, timeout_ms=timeout_ms, env_indices=env_indices):
            message.reset.seeds.extend(seeds)
            message.reset.options.CopyFrom(
                options_to_proto(options, tag_arrays=tag_arrays, max_bytes=max_bytes)
            )
            message.reset.timeout_ms = timeout_ms
            message.reset.env_indices.extend(env_indices)
        case Render(mask=mask, timeout_ms=timeout_ms):
            message.render.mask, message.render.timeout_ms = mask, timeout_ms
            message.render.SetInParent()
        case Close(reason=reason):
            message.close.reason = reason
            message.close.SetInParent()
    return message


def _reset_done(message: pb.JoinResponse) -> ResetDone:
    body = message.reset
    return ResetDone(
        message.request_id,
        observation=body.observation.bytes.data,
        infos=decode_meta(body.infos),
        episode_ids=tuple(body.episode_ids),
    )


def _step_done(message: pb.JoinResponse) -> StepDone:
    body = message.step
    return StepDone(
        message.request_id,
        observation=body.observation.bytes.data,
        rewards=array("d", body.rewards),
        terminated=as_flags(body.terminated_mask),
        truncated=as_flags(body.truncated_mask),
        infos=decode_meta(body.infos),
        completed_episodes=records_from_proto(body.completed_episodes),
        episode_ids=tuple(body.episode_ids),
    )


def _rendered(message: pb.JoinResponse) -> Rendered:
    body = message.render
    return Rendered(message.request_id, body.png_frame if body.HasField("png_frame") else None)


def closed_from_proto(message: Any) -> Closed:
    """Return the answer to Close in a message, of this wire or of one with the same fields."""
    return Closed(message.request_id, records_from_proto(message.close.final_episodes))


def failed_from_proto(message: Any) -> EnvFailed:
    """Return the error in a message, of this wire or of one with the same fields."""
    body = message.error
    return EnvFailed(
        message.request_id,
        code=EnvErrorCode(body.code),
        message=body.message,
        is_recoverable=body.is_recoverable,
        debug_info=body.debug_info,
        interrupted_episodes=records_from_proto(body.interrupted_episodes),
    )


_RESPONSES: dict[str, Callable[[pb.JoinResponse], EnvResponse]] = {
    "reset": _reset_done,
    "step": _step_done,
    "render": _rendered,
    "close": closed_from_proto,
    "error": failed_from_proto,
}

read_response: Callable[[bytes], EnvResponse] = partial(
    protobuf.read_response, pb.JoinResponse, _RESPONSES
)
"""Decodes as ``parse_response`` does, with the generated code only."""


def records_from_proto(messages: Iterable[Any]) -> tuple[EpisodeRecord, ...]:
    return tuple(
        EpisodeRecord(
            episode_id=message.episode_id,
            env_index=message.env_index,
            step_count=message.step_count,
            cumulative_reward=message.cumulative_reward,
            terminated=message.terminated,
            truncated=message.truncated,
            start_timestamp_ns=message.start_timestamp_ns,
            end_timestamp_ns=message.end_timestamp_ns,
            seed=message.seed if message.HasField("seed") else None,
            final_info=decode_meta(message.final_info),
        )
        for message in messages
    )


HANDSHAKE = HandshakeFrames(service_pb2)


_CACHED_BYTES = 2**16
"""Larger ids are not cached, since the peer chooses them."""


def pack_step(request: Step) -> bytes:
    """Return the frame of a step of all lanes; raises ValueError for an id without UTF-8 form."""
    head, tail = _around_action(len(request.action), request.timeout_ms)
    request_id = field(b"\x52", request.request_id.encode())  # JoinRequest.request_id
    return b"%b%b%b%b" % (head, request.action, tail, request_id)


@lru_cache(maxsize=64)
def _around_action(size: int, timeout_ms: int) -> tuple[bytes, bytes]:
    head = value_head(b"\x0a", size)  # StepRequest.action
    tail = b"\x10" + varint(timeout_ms)  # StepRequest.timeout_ms
    return b"\x12" + varint(len(head) + size + len(tail)) + head, tail  # JoinRequest.step


def pack_step_done(response: StepDone, extras: bytes) -> bytes:
    """Return the frame of ``response``; ``extras`` are its encoded infos and completed episodes."""
    observation = response.observation
    rewards = struct.pack(f"<{len(response.rewards)}d", *response.rewards)
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


class FastCodecMiss(Exception):
    """A frame of an unusual form, which the generated code decodes; never leaves this module."""


def parse_step_done(data: bytes) -> StepDone:
    """Return the response in ``data``; raises FastCodecMiss for the generated code's frames."""
    try:
        # JoinResponse.step, StepResponse.observation, SpaceValue.bytes and SpaceValueBytes.data
        start, (end, *value_ends) = _nested_at(data, b"\x12\x0a\x0a\x0a")
        at = value_ends[0]
        # .rewards, .terminated_mask, .truncated_mask
        (rewards, terminated, truncated), ids_at = _fields_at(data, at, end, b"\x12\x1a\x22")
        is_usual = value_ends == [at, at, at] and ids_at <= end and len(rewards) % 8 == 0
        # NumPy bools must be 0 or 1.
        if not is_usual or terminated.strip(b"\x00\x01") or truncated.strip(b"\x00\x01"):
            raise FastCodecMiss
        read_ids = _parse_ids if end - ids_at <= _CACHED_BYTES else _parse_ids.__wrapped__
        numbers = array("d", rewards)
        if sys.byteorder == "big":
            numbers.byteswap()
        return StepDone(
            _last_text(data, end, b"\xaa\x01"),  # JoinResponse.request_id
            data[start:at],
            numbers,
            terminated,
            truncated,
            {},
            (),
            read_ids(data[ids_at:end]),
        )
    except (IndexError, UnicodeDecodeError) as error:
        raise FastCodecMiss from error


def _nested_at(data: bytes, tags: bytes) -> tuple[int, list[int]]:
    """Return where the innermost of nested fields begins, and where each of them ends.

    Each is the first field of the one around it; the outermost is the first of the frame.
    """
    at, ends = 0, []
    for tag in tags:
        if data[at] != tag:
            raise FastCodecMiss
        size, at = data[at + 1], at + 2
        if size >= 0x80:
            size, at = _length_at(data, at - 1)
        ends.append(at + size)
    return at, ends


def _fields_at(data: bytes, at: int, end: int, tags: bytes) -> tuple[list[bytes], int]:
    """Return what adjacent fields contain, empty for a missing one, and where the last one ends."""
    found = []
    for tag in tags:
        if at >= end or data[at] != tag:
            found.append(b"")
            continue
        size, at = data[at + 1], at + 2
        if size >= 0x80:
            size, at = _length_at(data, at - 1)
        found.append(data[at : at + size])
        at += size
    return found, at


def _length_at(data: bytes, at: int) -> tuple[int, int]:
    """Return the varint at ``at``, below 2**28, and the position after it."""
    number = 0
    for shift in (0, 7, 14, 21):
        part = data[at]
        at += 1
        number |= (part & 0x7F) << shift
        if part < 0x80:
            return number, at
    raise FastCodecMiss


def _last_text(data: bytes, at: int, tag: bytes) -> str:
    """Return the text in the field ``tag`` at ``at``, the frame's last one; it may be missing."""
    if at == len(data):
        return ""
    start = at + len(tag) + 1
    size = data[start - 1]
    if size >= 0x80:
        size, start = _length_at(data, start - 1)
    if not data.startswith(tag, at) or start + size != len(data):
        raise FastCodecMiss
    return data[start:].decode()


# The ids of all lanes stay the same for many steps.
@lru_cache(maxsize=32)
def _parse_ids(data: bytes) -> tuple[str, ...]:
    ids, at = [], 0
    while at < len(data):
        if data[at] != 0x3A:  # StepResponse.episode_ids
            raise FastCodecMiss
        size, at = _length_at(data, at + 1)
        ids.append(data[at : at + size].decode())
        at += size
    if at != len(data):
        raise FastCodecMiss
    return tuple(ids)


def as_flags(mask: bytes) -> bytes:
    """Return ``mask`` with 1 for each nonzero byte, as NumPy bools must be 0 or 1."""
    return bytes(map(bool, mask)) if mask.strip(b"\x00\x01") else mask
