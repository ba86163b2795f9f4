"""Frames of EnvService: bytes to the messages of ``protocol`` and back.

The wire carries no episode ids from the server: they are empty here, and the client's to fill in.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence

from rlmesh_ray.dialects.released.wire.handshake import ReleasedHandshakeFrames
from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.messages import (
    MAX_ID_CHARACTERS,
    Close,
    Closed,
    Configure,
    Configured,
    EnvFailed,
    EnvRequest,
    EnvResponse,
    EnvTimings,
    EpisodeRecord,
    MalformedRequest,
    Render,
    Rendered,
    Reset,
    ResetDone,
    Step,
    StepDone,
)
from rlmesh_ray.wire._pb.rlmesh_wire.env.v1 import interaction_pb2 as pb
from rlmesh_ray.wire._pb.rlmesh_wire.env.v1 import service_pb2
from rlmesh_ray.wire.protobuf import few, field, read_request, read_response, varint
from rlmesh_ray.wire.rlmesh_v1.env import (
    as_flags,
    closed_from_proto,
    failed_from_proto,
    fill_error,
    infos_budget,
    options_to_proto,
    record_fields,
    records_from_proto,
    too_large,
)
from rlmesh_ray.wire.rlmesh_v1.handshake import HandshakeFrames
from rlmesh_ray.wire.rlmesh_v1.limits import MAX_MESSAGE_BYTES
from rlmesh_ray.wire.rlmesh_v1.meta import MetaBudget, decode_meta, decode_peer_meta, encode_meta

_LONGEST_TIMEOUT_MS = 2**63 - 1


def parse_request(data: bytes) -> EnvRequest | MalformedRequest:
    """Return the request in ``data``. Never raises: every frame gets an answer in band."""
    return read_request(pb.JoinRequest, _REQUESTS, data)


def pack_request(
    request: EnvRequest, *, tag_arrays: bool = False, max_bytes: int = MAX_MESSAGE_BYTES
) -> bytes:
    """Return the frame of ``request``.

    Args:
        request: The request.
        tag_arrays: Whether the peer has the capability NDARRAY; else options have no arrays.
        max_bytes: The largest frame that the peer accepts.

    Raises:
        CodecError: A seed, index or deadline does not fit its field, the action is no value, an
            option cannot travel, or the frame is too large.
    """
    try:
        frame = _request_message(request, tag_arrays, max_bytes).SerializeToString()
    except (TypeError, ValueError) as error:
        raise CodecError(f"{type(request).__name__} has no wire form: {error}") from error
    if len(frame) > max_bytes:
        raise too_large(request, len(frame), max_bytes)
    return frame


def _reset(message: pb.JoinRequest) -> Reset:
    body = message.reset
    return Reset(
        message.request_id,
        seeds=few(body.seeds, "seeds"),
        options=decode_peer_meta(body.options),
        timeout_ms=min(body.timeout_ms, _LONGEST_TIMEOUT_MS),
        env_indices=few(body.env_indices, "lanes"),
        episode_ids=_ids(body.episode_ids),
    )


def _step(message: pb.JoinRequest) -> Step:
    body = message.step
    return Step(
        message.request_id,
        body.action.SerializeToString(),
        min(body.timeout_ms, _LONGEST_TIMEOUT_MS),
        few(body.env_indices, "lanes"),
        _ids(body.episode_ids),
    )


def _render(message: pb.JoinRequest) -> Render:
    body = message.render
    timeout_ms = min(body.timeout_ms, _LONGEST_TIMEOUT_MS)
    return Render(message.request_id, b"", timeout_ms, few(body.env_indices, "lanes"))


def _ids(told: Sequence[str]) -> tuple[str, ...]:
    ids = few(told, "episode ids")
    longest = max(map(len, ids), default=0)
    if longest > MAX_ID_CHARACTERS:
        raise CodecError(
            f"an episode_id has {longest} characters, and {MAX_ID_CHARACTERS} are the limit"
        )
    return ids


_REQUESTS: dict[str, Callable[[pb.JoinRequest], EnvRequest]] = {
    "configure": lambda message: Configure(
        message.request_id, message.configure.selected_workflow_edition
    ),
    "reset": _reset,
    "step": _step,
    "render": _render,
    "close": lambda message: Close(message.request_id, message.close.reason),
}


def _request_message(request: EnvRequest, tag_arrays: bool, max_bytes: int) -> pb.JoinRequest:
    message = pb.JoinRequest(request_id=request.request_id)
    match request:
        case Step():
            message.step.action.MergeFromString(request.action)
            message.step.timeout_ms = request.timeout_ms
            message.step.env_indices.extend(request.env_indices)
            message.step.episode_ids.extend(request.episode_ids)
        case Reset():
            message.reset.seeds.extend(request.seeds)
            message.reset.options.CopyFrom(
                options_to_proto(request.options, tag_arrays=tag_arrays, max_bytes=max_bytes)
            )
            message.reset.timeout_ms = request.timeout_ms
            message.reset.env_indices.extend(request.env_indices)
            message.reset.episode_ids.extend(request.episode_ids)
        case Render():
            message.render.env_indices.extend(request.env_indices)
            message.render.timeout_ms = request.timeout_ms
            message.render.SetInParent()
        case Close(reason=reason):
            message.close.reason = reason
            message.close.SetInParent()
        case Configure(edition=edition):
            message.configure.selected_workflow_edition = edition
            message.configure.SetInParent()
    return message


def _episodes(
    records: Iterable[EpisodeRecord], tag_arrays: bool, budget: MetaBudget | None = None
) -> list[pb.EpisodeMetadata]:
    budget = budget or MetaBudget()
    return [pb.EpisodeMetadata(**record_fields(each, tag_arrays, budget)) for each in records]


def pack_response(response: EnvResponse, *, tag_arrays: bool = False) -> bytes:
    """Return the frame of ``response``; its infos are limited as ``rlmesh_v1.env`` does it.

    Args:
        response: To encode.
        tag_arrays: Whether the peer decodes arrays in infos.
    """
    match response:
        case StepDone():
            return _pack_observed(b"\x12", response, _step_rest(response, tag_arrays))
        case ResetDone():
            return _pack_observed(b"\x0a", response, _reset_rest(response, tag_arrays))
    return _response_message(response, tag_arrays).SerializeToString()


def _response_message(
    response: Configured | Rendered | Closed | EnvFailed, tag_arrays: bool
) -> pb.JoinResponse:
    message = pb.JoinResponse(request_id=response.request_id)
    match response:
        case Configured():
            message.configure.SetInParent()
        case Rendered(png=png):
            message.render.SetInParent()
            if png is not None:
                message.render.frame = png
                message.render.format = pb.RENDER_FORMAT_PNG
        case Closed(final_episodes=episodes):
            message.close.SetInParent()
            message.close.final_episodes.extend(_episodes(episodes, tag_arrays))
        case EnvFailed():
            fill_error(
                message.error, response, _episodes(response.interrupted_episodes, tag_arrays)
            )
    return message


def with_timings(frame: bytes, timings: EnvTimings) -> bytes:
    """Return the frame of a response with its timings, which are the frame's last fields."""
    told = pb.JoinResponse(
        endpoint_total_ns=timings.endpoint_total_ns,
        decode_ns=timings.decode_ns,
        user_ns=timings.user_ns,
        encode_ns=timings.encode_ns,
        queue_ns=timings.queue_ns,
    )
    return frame + told.SerializeToString()


def _pack_observed(tag: bytes, response: ResetDone | StepDone, rest: bytes) -> bytes:
    """Write a response round its observation, with one copy of that.

    Args:
        tag: The tag of the field in ``JoinResponse``.
        response: Has the observation and the request's id.
        rest: The response's other fields.
    """
    observation = response.observation
    head = b"\x0a" + varint(len(observation))  # StepResponse.observation, and ResetResponse's
    size = len(head) + len(observation) + len(rest)
    request_id = field(b"\x2a", response.request_id.encode())  # JoinResponse.request_id
    return b"".join((tag, varint(size), head, observation, rest, request_id))


def _reset_rest(response: ResetDone, tag_arrays: bool) -> bytes:
    body = pb.ResetResponse()
    if response.infos:
        budget = infos_budget(response)
        body.infos.CopyFrom(encode_meta(response.infos, tag_arrays=tag_arrays, budget=budget))
    return body.SerializeToString()


def _step_rest(response: StepDone, tag_arrays: bool) -> bytes:
    body = pb.StepResponse(
        rewards=response.rewards,
        terminated_mask=response.terminated,
        truncated_mask=response.truncated,
        env_indices=response.env_indices,
    )
    if response.infos or response.completed_episodes:
        budget = infos_budget(response)
        if response.infos:
            body.infos.CopyFrom(encode_meta(response.infos, tag_arrays=tag_arrays, budget=budget))
        body.completed_episodes.extend(_episodes(response.completed_episodes, tag_arrays, budget))
    return body.SerializeToString()


def parse_response(data: bytes) -> EnvResponse:
    """Return the response in ``data``; its episode ids are empty.

    Raises:
        CodecError: ``data`` is none, or of no kind that is known here.
    """
    return read_response(pb.JoinResponse, _RESPONSES, data)


def _reset_done(message: pb.JoinResponse) -> ResetDone:
    body = message.reset
    observation = body.observation.SerializeToString()
    return ResetDone(message.request_id, observation, decode_meta(body.infos), ())


def _step_done(message: pb.JoinResponse) -> StepDone:
    body = message.step
    return StepDone(
        message.request_id,
        observation=body.observation.SerializeToString(),
        rewards=array("d", body.rewards),
        terminated=as_flags(body.terminated_mask),
        truncated=as_flags(body.truncated_mask),
        infos=decode_meta(body.infos),
        completed_episodes=records_from_proto(body.completed_episodes),
        episode_ids=(),
        env_indices=tuple(body.env_indices),
    )


def _rendered(message: pb.JoinResponse) -> Rendered:
    body = message.render
    return Rendered(message.request_id, body.frame if body.HasField("frame") else None)


_RESPONSES: dict[str, Callable[[pb.JoinResponse], EnvResponse]] = {
    "reset": _reset_done,
    "step": _step_done,
    "render": _rendered,
    "close": closed_from_proto,
    "configure": lambda message: Configured(message.request_id),
    "error": failed_from_proto,
}


HANDSHAKE: HandshakeFrames = ReleasedHandshakeFrames(service_pb2)
