"""The requests of a model session: bytes to messages and back."""

from collections.abc import Callable

from rlmesh_ray.dialects.released.protocol.model_messages import (
    AdapterContext,
    AdapterPredict,
    AnyAdapterRequest,
    CloseParticipant,
    GroupedPredict,
    ReleaseAdapter,
    ResetAdapter,
    ResolveAdapter,
    RowEpisode,
)
from rlmesh_ray.dialects.released.wire.contract import env_spec_from_proto, env_spec_to_proto
from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.messages import MalformedRequest
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire._pb.rlmesh_wire.model.v1 import interaction_pb2 as pb
from rlmesh_ray.wire.envelope import read_request


def context_from_proto(message: pb.AdapterContext) -> AdapterContext:
    """Return the context in ``message``."""
    return AdapterContext(message.session_id, message.env_id, message.request_id)


def context_to_proto(context: AdapterContext) -> pb.AdapterContext:
    """Return the message of ``context``."""
    return pb.AdapterContext(
        session_id=context.session_id, env_id=context.env_id, request_id=context.request_id
    )


# What a request asks is read in the serving loop, where every other session waits for it.
MAX_ROWS = 2**14
"""Episodes that one request may name, over all its groups."""
MAX_GROUPS = 2**10
"""Adapters that one request may ask."""


def parse_request(data: bytes) -> AnyAdapterRequest | MalformedRequest:
    """Return the request in ``data``. Never raises: every frame gets an answer in band."""
    return read_request(pb.JoinRequest, _REQUESTS, data)


def pack_request(request: AnyAdapterRequest) -> bytes:
    """Return the frame of ``request``; the environment of an adapter is an ``EnvContract``.

    Raises:
        CodecError: A number does not fit its field, or an observation is no value.
    """
    try:
        return _request_message(request).SerializeToString()
    except (TypeError, ValueError) as error:
        raise CodecError(f"{type(request).__name__} has no wire form: {error}") from error


def _resolve(message: pb.JoinRequest) -> ResolveAdapter:
    body = message.resolve_adapter
    return ResolveAdapter(
        message.request_id,
        context_from_proto(body.context),
        env_spec_from_proto(body.env_spec) if body.HasField("env_spec") else None,
        body.selected_workflow_edition,
        body.execution_horizon,
        body.delivers_history,
    )


def _predict(request_id: str, body: pb.PredictRequest) -> AdapterPredict:
    return AdapterPredict(
        request_id,
        context_from_proto(body.context),
        body.observation.SerializeToString(),
        tuple(
            RowEpisode(row.episode_id, row.seed if row.HasField("seed") else None)
            for row in body.episode_info
        ),
        body.step if body.HasField("step") else None,
    )


def _predict_alone(message: pb.JoinRequest) -> AdapterPredict:
    _check_count("episodes", len(message.predict.episode_info), MAX_ROWS)
    return _predict(message.request_id, message.predict)


def _grouped(message: pb.JoinRequest) -> GroupedPredict:
    groups = message.grouped_predict.groups
    _check_count("groups", len(groups), MAX_GROUPS)
    _check_count("episodes", sum(len(group.episode_info) for group in groups), MAX_ROWS)
    return GroupedPredict(
        message.request_id, tuple(_predict(group.context.request_id, group) for group in groups)
    )


def _release(message: pb.JoinRequest) -> ReleaseAdapter:
    body = message.release_adapter
    return ReleaseAdapter(message.request_id, context_from_proto(body.context), body.reason)


def _reset(message: pb.JoinRequest) -> ResetAdapter:
    body = message.reset_adapter
    _check_count("episodes", len(body.episode_ids), MAX_ROWS)
    return ResetAdapter(
        message.request_id, context_from_proto(body.context), tuple(body.episode_ids)
    )


def _check_count(what: str, count: int, most: int) -> None:
    if count > most:
        raise CodecError(f"{count} {what}, and {most} are the limit: ask in several requests")


_REQUESTS: dict[str, Callable[[pb.JoinRequest], AnyAdapterRequest]] = {
    "resolve_adapter": _resolve,
    "predict": _predict_alone,
    "grouped_predict": _grouped,
    "release_adapter": _release,
    "reset_adapter": _reset,
    "close": lambda message: CloseParticipant(message.request_id, message.close.reason),
}


def _request_message(request: AnyAdapterRequest) -> pb.JoinRequest:
    message = pb.JoinRequest(request_id=request.request_id)
    match request:
        case AdapterPredict():
            _fill_predict(message.predict, request)
        case GroupedPredict(groups=groups):
            message.grouped_predict.SetInParent()
            for group in groups:
                _fill_predict(message.grouped_predict.groups.add(), group)
        case ResolveAdapter():
            _fill_resolve(message.resolve_adapter, request)
        case ResetAdapter(context=context, episode_ids=episode_ids):
            message.reset_adapter.context.CopyFrom(context_to_proto(context))
            message.reset_adapter.episode_ids.extend(episode_ids)
        case ReleaseAdapter(context=context, reason=reason):
            message.release_adapter.context.CopyFrom(context_to_proto(context))
            message.release_adapter.reason = reason
        case CloseParticipant(reason=reason):
            message.close.reason = reason
            message.close.SetInParent()
    return message


def _fill_resolve(body: pb.ResolveAdapterRequest, request: ResolveAdapter) -> None:
    body.context.CopyFrom(context_to_proto(request.context))
    if isinstance(request.env_spec, EnvContract):
        body.env_spec.CopyFrom(env_spec_to_proto(request.env_spec))
    body.selected_workflow_edition = request.edition
    body.execution_horizon = request.execution_horizon
    body.delivers_history = request.delivers_history


def _fill_predict(body: pb.PredictRequest, request: AdapterPredict) -> None:
    body.context.CopyFrom(context_to_proto(request.context))
    body.observation.MergeFromString(request.observation)
    for episode_id, seed in request.episodes:
        body.episode_info.add(episode_id=episode_id, seed=seed)
    if request.step is not None:
        body.step = request.step
