"""Frames of ModelService: bytes to the messages of ``protocol`` and back.

An adapter is a route, whose id is that of its environment. A row has an episode and no lane: the
slots that are read here have the lane ``NO_LANE``.
"""

from collections.abc import Callable, Mapping

from rlmesh_ray.dialects.released.protocol import GroupedPredict, GroupedPredicted
from rlmesh_ray.dialects.released.wire.handshake import ReleasedHandshakeFrames
from rlmesh_ray.dialects.released.wire.specs import env_spec_from_proto, env_spec_to_proto
from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.capabilities import EDITION_NAME
from rlmesh_ray.protocol.handshake import quoted
from rlmesh_ray.protocol.messages import (
    BatchRun,
    CloseModel,
    CloseRoute,
    ConfigureRoute,
    MalformedRequest,
    ModelClosed,
    ModelErrorCode,
    ModelFailed,
    Predict,
    PredictContext,
    Predicted,
    PredictSlot,
    RouteClosed,
    RouteConfigured,
)
from rlmesh_ray.protocol.model_session import (
    EpisodesForgotten,
    ForgetEpisodes,
    SessionRequest,
    SessionResponse,
)
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire._pb.rlmesh_wire.model.v1 import interaction_pb2 as pb
from rlmesh_ray.wire._pb.rlmesh_wire.model.v1 import service_pb2
from rlmesh_ray.wire.protobuf import as_utf8, field, read_request, read_response, varint
from rlmesh_ray.wire.rlmesh_v1.handshake import HandshakeFrames

NO_LANE = -1
# What a request asks is read in the serving loop, where every other session waits for it.
MAX_ROWS = 2**14
"""Episodes that one request may name, over all its groups."""
MAX_GROUPS = 2**10
"""Adapters that one request may ask."""

FrameRequest = SessionRequest | GroupedPredict | MalformedRequest
"""The request in a frame."""
FrameResponse = SessionResponse | GroupedPredicted
"""The response in a frame."""


def parse_request(data: bytes) -> FrameRequest:
    """Return the request in ``data``. Never raises: every frame gets an answer in band."""
    return read_request(pb.JoinRequest, _REQUESTS, data)


def pack_request(request: SessionRequest | GroupedPredict) -> bytes:
    """Return the frame of ``request``; the contract of an adapter is an ``EnvContract``.

    Raises:
        CodecError: A number does not fit its field, or an observation is no value.
    """
    try:
        return _request_message(request).SerializeToString()
    except (TypeError, ValueError) as error:
        raise CodecError(f"{type(request).__name__} has no wire form: {error}") from error


def _context(message: pb.AdapterContext, slots: tuple[PredictSlot, ...] = ()) -> PredictContext:
    return PredictContext(message.session_id, message.env_id, message.request_id, slots)


def _context_to_proto(context: PredictContext) -> pb.AdapterContext:
    return pb.AdapterContext(
        session_id=context.session_id, env_id=context.route_id, request_id=context.request_id
    )


def _resolve(message: pb.JoinRequest) -> ConfigureRoute | MalformedRequest:
    body, request_id = message.resolve_adapter, message.request_id
    if not body.context.env_id:
        return MalformedRequest(request_id, "resolve_adapter has no env_id")
    if not body.HasField("env_spec"):
        return MalformedRequest(request_id, "resolve_adapter has no env_spec")
    edition = body.selected_workflow_edition
    # Builds before the release named theirs after it, such as 2026.06-0.1.0-rc.5.
    if edition and edition.partition("-")[0] != EDITION_NAME:
        return MalformedRequest(
            request_id,
            f"resolve_adapter selects edition {quoted(edition)!r}; this is {EDITION_NAME}",
        )
    contract = env_spec_from_proto(body.env_spec)
    # 0, and 1, are one action of a chunk.
    horizon = max(1, body.execution_horizon)
    return ConfigureRoute(request_id, _context(body.context), contract, horizon)


def _predict(request_id: str, body: pb.PredictRequest) -> Predict | MalformedRequest:
    if not body.context.env_id:
        return MalformedRequest(request_id, "predict has no env_id")
    step = body.step
    slots = tuple(PredictSlot(NO_LANE, row.episode_id, step, False) for row in body.episode_info)
    context = _context(body.context, slots)
    return Predict(request_id, context, body.observation.SerializeToString())


def _predict_alone(message: pb.JoinRequest) -> Predict | MalformedRequest:
    _check_count("episodes", len(message.predict.episode_info), MAX_ROWS)
    return _predict(message.request_id, message.predict)


def _grouped(message: pb.JoinRequest) -> GroupedPredict | MalformedRequest:
    groups = message.grouped_predict.groups
    _check_count("groups", len(groups), MAX_GROUPS)
    _check_count("episodes", sum(len(group.episode_info) for group in groups), MAX_ROWS)
    if not groups:
        return MalformedRequest(message.request_id, "grouped_predict has no groups")
    return GroupedPredict(
        message.request_id, tuple(_predict(group.context.request_id, group) for group in groups)
    )


def _release(message: pb.JoinRequest) -> CloseRoute:
    body = message.release_adapter
    return CloseRoute(message.request_id, _context(body.context), body.reason)


def _reset(message: pb.JoinRequest) -> ForgetEpisodes:
    body = message.reset_adapter
    _check_count("episodes", len(body.episode_ids), MAX_ROWS)
    return ForgetEpisodes(message.request_id, _context(body.context), tuple(body.episode_ids))


def _check_count(what: str, count: int, most: int) -> None:
    if count > most:
        raise CodecError(f"{count} {what}, and {most} are the limit: ask in several requests")


_REQUESTS: dict[str, Callable[[pb.JoinRequest], FrameRequest]] = {
    "resolve_adapter": _resolve,
    "predict": _predict_alone,
    "grouped_predict": _grouped,
    "release_adapter": _release,
    "reset_adapter": _reset,
    "close": lambda message: CloseModel(message.request_id, message.close.reason),
}


def _request_message(request: SessionRequest | GroupedPredict) -> pb.JoinRequest:
    message = pb.JoinRequest(request_id=request.request_id)
    match request:
        case Predict():
            _fill_predict(message.predict, request)
        case GroupedPredict(groups=groups):
            message.grouped_predict.SetInParent()
            for group in groups:
                if isinstance(group, Predict):
                    _fill_predict(message.grouped_predict.groups.add(), group)
        case ConfigureRoute(context=context, contract=contract, horizon=horizon):
            message.resolve_adapter.context.CopyFrom(_context_to_proto(context))
            if isinstance(contract, EnvContract):
                message.resolve_adapter.env_spec.CopyFrom(env_spec_to_proto(contract))
            message.resolve_adapter.selected_workflow_edition = EDITION_NAME
            message.resolve_adapter.execution_horizon = horizon
        case ForgetEpisodes(context=context, episode_ids=episode_ids):
            message.reset_adapter.context.CopyFrom(_context_to_proto(context))
            message.reset_adapter.episode_ids.extend(episode_ids)
        case CloseRoute(context=context, reason=reason):
            message.release_adapter.context.CopyFrom(_context_to_proto(context))
            message.release_adapter.reason = reason
        case CloseModel(reason=reason):
            message.close.reason = reason
            message.close.SetInParent()
    return message


def _fill_predict(body: pb.PredictRequest, request: Predict) -> None:
    body.context.CopyFrom(_context_to_proto(request.context))
    body.observation.MergeFromString(request.observation)
    for slot in request.context.slots:
        body.episode_info.add(episode_id=slot.episode_id)
        # All rows of a request have the same step; a runtime that counts none sends none.
        if slot.step:
            body.step = slot.step


# The numbers differ from those of the edition.
_CODE_NUMBERS = {
    code: pb.ModelErrorCode.Value(f"MODEL_ERROR_CODE_{code.name}") for code in ModelErrorCode
}
_CODES = {number: code for code, number in _CODE_NUMBERS.items()}


def pack_response(response: FrameResponse, request_id: str | None = None) -> bytes:
    """Return the frame of ``response``.

    Args:
        response: To encode.
        request_id: The client's id of the request; None: the response's.
    """
    request_id = response.request_id if request_id is None else request_id
    if isinstance(response, Predicted):
        body = _predicted_bytes(response)
        ending = field(b"\x2a", request_id.encode())  # JoinResponse.request_id
        return b"\x12%b%b%b" % (varint(len(body)), body, ending)  # JoinResponse.predict
    message = pb.JoinResponse(request_id=request_id)
    match response:
        case RouteConfigured(horizon=horizon):
            message.resolve_adapter.SetInParent()
            # One action at a time is no length of a chunk: a runtime refuses a horizon beyond a
            # chunk of 1, and accepts any horizon if there is no length.
            if horizon > 1:
                message.resolve_adapter.native_chunk = horizon
        case GroupedPredicted(results=results):
            message.grouped_predict.results.extend(map(_result_to_proto, results))
            message.grouped_predict.SetInParent()
        case EpisodesForgotten():
            message.reset_adapter.SetInParent()
        case RouteClosed():
            message.release_adapter.SetInParent()
        case ModelClosed():
            message.close.SetInParent()
        case ModelFailed():
            message.error.CopyFrom(_error_to_proto(response))
    return message.SerializeToString()


def with_timings(frame: bytes, timings: Mapping[str, int]) -> bytes:
    """Return the frame of a response with its timings, by the names of their fields, behind it."""
    return frame + pb.JoinResponse(**timings).SerializeToString()  # type: ignore[arg-type]


def _predicted_bytes(response: Predicted) -> bytes:
    """Return a ``PredictResponse``, written by hand, since its actions are bytes already."""
    context = _context_to_proto(response.context).SerializeToString()
    parts = [b"\x0a", varint(len(context)), context]  # PredictResponse.context
    for action in (response.action, *response.later):
        parts += [b"\x12", varint(len(action)), action]  # PredictResponse.actions
    return b"".join(parts)


def _result_to_proto(result: SessionResponse) -> pb.GroupedPredictResult:
    if isinstance(result, Predicted):
        response = pb.PredictResponse.FromString(_predicted_bytes(result))
        return pb.GroupedPredictResult(response=response)
    assert isinstance(result, ModelFailed)
    return pb.GroupedPredictResult(error=_error_to_proto(result))


def _error_to_proto(failed: ModelFailed) -> pb.ModelError:
    return pb.ModelError(
        code=_CODE_NUMBERS[failed.code],  # type: ignore[arg-type]  # enums are ints
        message=as_utf8(failed.message),
        is_recoverable=failed.is_recoverable,
        debug_info=as_utf8(failed.debug_info),
    )


def parse_response(data: bytes) -> FrameResponse:
    """Return the response in ``data``.

    Raises:
        CodecError: ``data`` is none, of no kind that is known here, or a prediction of no actions.
    """
    return read_response(pb.JoinResponse, _RESPONSES, data)


def _predicted(message: pb.JoinResponse, request_id: str, body: pb.PredictResponse) -> Predicted:
    """Return a prediction; its frame may tell how long it took."""
    actions = [action.SerializeToString() for action in body.actions]
    if not actions:
        raise CodecError("a prediction holds no actions")
    run = None
    if message.HasField("queue_ns") and message.HasField("user_ns"):
        run = BatchRun(policy_version=-1, num_rows=0, forward_ns=message.user_ns)
    return Predicted(
        request_id,
        _context(body.context),
        actions[0],
        run,
        message.queue_ns,
        later=tuple(actions[1:]),
    )


def _grouped_results(message: pb.JoinResponse) -> GroupedPredicted:
    results: list[SessionResponse] = []
    for result in message.grouped_predict.results:
        if result.WhichOneof("outcome") == "response":
            body = result.response
            results.append(_predicted(message, body.context.request_id, body))
        else:
            results.append(_failed("", result.error))
    return GroupedPredicted(message.request_id, tuple(results))


def _failed(request_id: str, body: pb.ModelError) -> ModelFailed:
    # Another implementation may know codes that this one does not.
    code = _CODES.get(body.code, ModelErrorCode.UNSPECIFIED)
    return ModelFailed(request_id, code, body.message, body.is_recoverable, body.debug_info)


_RESPONSES: dict[str, Callable[[pb.JoinResponse], FrameResponse]] = {
    # 0: the server does not report it.
    "resolve_adapter": lambda message: RouteConfigured(
        message.request_id, message.resolve_adapter.native_chunk
    ),
    "predict": lambda message: _predicted(message, message.request_id, message.predict),
    "grouped_predict": _grouped_results,
    "reset_adapter": lambda message: EpisodesForgotten(message.request_id),
    "release_adapter": lambda message: RouteClosed(message.request_id),
    "close": lambda message: ModelClosed(message.request_id),
    "error": lambda message: _failed(message.request_id, message.error),
}


HANDSHAKE: HandshakeFrames = ReleasedHandshakeFrames(service_pb2)
