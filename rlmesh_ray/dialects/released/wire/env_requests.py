"""The requests of a session with an environment: bytes to messages and back."""

from collections.abc import Callable, Sequence

from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.episodes import MAX_ID_CHARACTERS
from rlmesh_ray.protocol.messages import (
    Close,
    Configure,
    EnvRequest,
    MalformedRequest,
    Render,
    Reset,
    Step,
)
from rlmesh_ray.wire._pb.rlmesh_wire.env.v1 import interaction_pb2 as pb
from rlmesh_ray.wire.envelope import read_request
from rlmesh_ray.wire.rlmesh_v1.env import options_to_proto, require_size
from rlmesh_ray.wire.rlmesh_v1.limits import MAX_MESSAGE_BYTES
from rlmesh_ray.wire.rlmesh_v1.meta import decode_peer_meta
from rlmesh_ray.wire.validation import few

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
    return require_size(request, frame, max_bytes)


def _configure(message: pb.JoinRequest) -> Configure:
    return Configure(message.request_id, message.configure.selected_workflow_edition)


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


def _close(message: pb.JoinRequest) -> Close:
    return Close(message.request_id, message.close.reason)


def _ids(told: Sequence[str]) -> tuple[str, ...]:
    ids = few(told, "episode ids")
    longest = max(map(len, ids), default=0)
    if longest > MAX_ID_CHARACTERS:
        raise CodecError(
            f"an episode_id has {longest} characters, and {MAX_ID_CHARACTERS} are the limit"
        )
    return ids


_REQUESTS: dict[str, Callable[[pb.JoinRequest], EnvRequest]] = {
    "configure": _configure,
    "reset": _reset,
    "step": _step,
    "render": _render,
    "close": _close,
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
