"""The responses of a session with an environment: messages to bytes and back.

The wire carries no episode ids from the server: they are empty here, and the client's to fill in.
"""

from array import array
from collections.abc import Callable, Iterable

from rlmesh_ray.dialects.released.wire.timings import with_numbers
from rlmesh_ray.protocol.messages import (
    Closed,
    Configured,
    EnvFailed,
    EnvResponse,
    EnvTimings,
    EpisodeRecord,
    Rendered,
    ResetDone,
    StepDone,
)
from rlmesh_ray.wire._pb.rlmesh_wire.env.v1 import interaction_pb2 as pb
from rlmesh_ray.wire.envelope import read_response
from rlmesh_ray.wire.protobuf import as_utf8, field, varint
from rlmesh_ray.wire.rlmesh_v1.env import (
    as_flags,
    closed_from_proto,
    failed_from_proto,
    infos_budget,
    records_from_proto,
)
from rlmesh_ray.wire.rlmesh_v1.meta import MetaBudget, decode_meta, encode_meta


def records_to_proto(
    records: Iterable[EpisodeRecord], *, tag_arrays: bool, budget: MetaBudget | None = None
) -> list[pb.EpisodeMetadata]:
    """Return the messages of ``records``.

    Args:
        records: To encode.
        tag_arrays: Whether the peer decodes arrays in infos.
        budget: Shared with the other infos of the frame; default: a new one for these.
    """
    budget = budget or MetaBudget()
    return [
        pb.EpisodeMetadata(
            episode_id=record.episode_id,
            seed=record.seed,
            env_index=record.env_index,
            step_count=record.step_count,
            cumulative_reward=record.cumulative_reward,
            terminated=record.terminated,
            truncated=record.truncated,
            start_timestamp_ns=record.start_timestamp_ns,
            end_timestamp_ns=record.end_timestamp_ns,
            final_info=encode_meta(record.final_info, tag_arrays=tag_arrays, budget=budget),
        )
        for record in records
    ]


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
            message.close.final_episodes.extend(records_to_proto(episodes, tag_arrays=tag_arrays))
        case EnvFailed():
            _fill_error(message.error, response, tag_arrays)
    return message


def with_timings(frame: bytes, timings: EnvTimings) -> bytes:
    """Return ``frame``, a response, with its timings."""
    numbers = (
        (6, timings.endpoint_total_ns),
        (11, timings.decode_ns),
        (12, timings.user_ns),
        (13, timings.encode_ns),
        (15, timings.queue_ns),
    )
    return with_numbers(frame, numbers)


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
        body.completed_episodes.extend(
            records_to_proto(response.completed_episodes, tag_arrays=tag_arrays, budget=budget)
        )
    return body.SerializeToString()


def _fill_error(body: pb.EnvError, response: EnvFailed, tag_arrays: bool) -> None:
    body.code = response.code.value  # type: ignore[assignment]  # enums are ints
    body.message = as_utf8(response.message)
    body.is_recoverable = response.is_recoverable
    body.debug_info = as_utf8(response.debug_info)
    body.interrupted_episodes.extend(
        records_to_proto(response.interrupted_episodes, tag_arrays=tag_arrays)
    )


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
