"""Frames of ModelService: bytes to the messages of ``protocol`` and back."""

from collections.abc import Callable, Iterable

from rlmesh_ray.dialects.released.protocol import (
    AdapterPredict,
    AdapterPredicted,
    AdapterResolved,
    AnyAdapterRequest,
    AnyAdapterResponse,
    EpisodesForgotten,
    GroupedPredict,
    GroupedPredicted,
    ModelTimings,
    ResolveAdapter,
    RowEpisode,
)
from rlmesh_ray.dialects.released.wire import handshake
from rlmesh_ray.dialects.released.wire.specs import env_spec_from_proto, env_spec_to_proto
from rlmesh_ray.dialects.released.wire.timings import with_numbers
from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.handshake import HandshakeRequest, HandshakeResponse
from rlmesh_ray.protocol.messages import (
    CloseModel,
    CloseRoute,
    MalformedRequest,
    ModelClosed,
    ModelErrorCode,
    ModelFailed,
    PredictContext,
    RouteClosed,
)
from rlmesh_ray.protocol.model_session import ForgetEpisodes
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire._pb.rlmesh_wire.model.v1 import interaction_pb2 as pb
from rlmesh_ray.wire._pb.rlmesh_wire.model.v1 import service_pb2
from rlmesh_ray.wire.protobuf import as_utf8, field, parse, read_request, read_response, varint


def context_from_proto(message: pb.AdapterContext) -> PredictContext:
    return PredictContext(message.session_id, message.env_id, message.request_id)


def context_to_proto(context: PredictContext) -> pb.AdapterContext:
    return pb.AdapterContext(
        session_id=context.session_id, env_id=context.route_id, request_id=context.request_id
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


def _release(message: pb.JoinRequest) -> CloseRoute:
    body = message.release_adapter
    return CloseRoute(message.request_id, context_from_proto(body.context), body.reason)


def _reset(message: pb.JoinRequest) -> ForgetEpisodes:
    body = message.reset_adapter
    _check_count("episodes", len(body.episode_ids), MAX_ROWS)
    return ForgetEpisodes(
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
    "close": lambda message: CloseModel(message.request_id, message.close.reason),
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
        case ForgetEpisodes(context=context, episode_ids=episode_ids):
            message.reset_adapter.context.CopyFrom(context_to_proto(context))
            message.reset_adapter.episode_ids.extend(episode_ids)
        case CloseRoute(context=context, reason=reason):
            message.release_adapter.context.CopyFrom(context_to_proto(context))
            message.release_adapter.reason = reason
        case CloseModel(reason=reason):
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


# The numbers differ from those of the edition.
_CODE_NUMBERS = {
    code: pb.ModelErrorCode.Value(f"MODEL_ERROR_CODE_{code.name}") for code in ModelErrorCode
}
_CODES = {number: code for code, number in _CODE_NUMBERS.items()}


def pack_response(response: AnyAdapterResponse) -> bytes:
    if isinstance(response, AdapterPredicted):
        body = _predicted_bytes(response)
        request_id = field(b"\x2a", response.request_id.encode())  # JoinResponse.request_id
        return b"\x12%b%b%b" % (varint(len(body)), body, request_id)  # JoinResponse.predict
    return _response_message(response).SerializeToString()


def parse_response(data: bytes) -> AnyAdapterResponse:
    """Return the response in ``data``.

    Raises:
        CodecError: ``data`` is none, or of no kind that is known here.
    """
    return read_response(pb.JoinResponse, _RESPONSES, data)


def with_timings(frame: bytes, timings: ModelTimings) -> bytes:
    numbers = (
        (6, timings.endpoint_total_ns),
        (11, timings.decode_ns),
        (12, timings.user_ns),
        (13, timings.encode_ns),
        (14, timings.queue_ns),
        (15, timings.in_flight),
        (17, timings.held_episodes),
    )
    return with_numbers(frame, numbers)


def parse_timings(data: bytes) -> ModelTimings:
    """Return the timings of the response in ``data``. Raises CodecError if it is none."""
    message = parse(pb.JoinResponse, data, most_parts=None)
    names = ModelTimings.__slots__  # type: ignore[attr-defined]  # a dataclass with slots
    told = {name: getattr(message, name) for name in names if message.HasField(name)}
    return ModelTimings(**told)


def _predicted_bytes(response: AdapterPredicted) -> bytes:
    """Return a ``PredictResponse``, written by hand, since its actions are bytes already."""
    context = context_to_proto(response.context).SerializeToString()
    parts = [b"\x0a", varint(len(context)), context]  # PredictResponse.context
    for action in response.actions:
        parts += [b"\x12", varint(len(action)), action]  # PredictResponse.actions
    return b"".join(parts)


def _response_message(response: AnyAdapterResponse) -> pb.JoinResponse:
    message = pb.JoinResponse(request_id=response.request_id)
    match response:
        case AdapterResolved():
            message.resolve_adapter.CopyFrom(_resolved_to_proto(response))
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
    return message


def _resolved_to_proto(response: AdapterResolved) -> pb.ResolveAdapterResponse:
    message = pb.ResolveAdapterResponse(native_chunk=response.native_chunk)
    if response.history_keys:
        message.history.keys.extend(response.history_keys)
    return message


def _result_to_proto(result: AdapterPredicted | ModelFailed) -> pb.GroupedPredictResult:
    if isinstance(result, ModelFailed):
        return pb.GroupedPredictResult(error=_error_to_proto(result))
    response = pb.PredictResponse.FromString(_predicted_bytes(result))
    return pb.GroupedPredictResult(response=response)


def _error_to_proto(failed: ModelFailed) -> pb.ModelError:
    return pb.ModelError(
        code=_CODE_NUMBERS[failed.code],  # type: ignore[arg-type]  # enums are ints
        message=as_utf8(failed.message),
        is_recoverable=failed.is_recoverable,
        debug_info=as_utf8(failed.debug_info),
    )


def _resolved(message: pb.JoinResponse) -> AdapterResolved:
    body = message.resolve_adapter
    chunk = body.native_chunk if body.HasField("native_chunk") else None
    return AdapterResolved(message.request_id, chunk, tuple(body.history.keys))


def _predicted(request_id: str, body: pb.PredictResponse) -> AdapterPredicted:
    actions = tuple(action.SerializeToString() for action in body.actions)
    return AdapterPredicted(request_id, context_from_proto(body.context), actions)


def _grouped_results(
    results: Iterable[pb.GroupedPredictResult],
) -> Iterable[AdapterPredicted | ModelFailed]:
    for result in results:
        if result.WhichOneof("outcome") == "response":
            yield _predicted(result.response.context.request_id, result.response)
        else:
            yield _failed("", result.error)


def _failed(request_id: str, body: pb.ModelError) -> ModelFailed:
    # Another implementation may know codes that this one does not.
    code = _CODES.get(body.code, ModelErrorCode.UNSPECIFIED)
    return ModelFailed(request_id, code, body.message, body.is_recoverable, body.debug_info)


_RESPONSES: dict[str, Callable[[pb.JoinResponse], AnyAdapterResponse]] = {
    "resolve_adapter": _resolved,
    "predict": lambda message: _predicted(message.request_id, message.predict),
    "grouped_predict": lambda message: GroupedPredicted(
        message.request_id, tuple(_grouped_results(message.grouped_predict.results))
    ),
    "reset_adapter": lambda message: EpisodesForgotten(message.request_id),
    "release_adapter": lambda message: RouteClosed(message.request_id),
    "close": lambda message: ModelClosed(message.request_id),
    "error": lambda message: _failed(message.request_id, message.error),
}


pack_shutdown_request = handshake.pack_shutdown_request
pack_shutdown_response = handshake.pack_shutdown_response
parse_shutdown_request = handshake.parse_shutdown_request
parse_shutdown_response = handshake.parse_shutdown_response


def parse_handshake_request(data: bytes) -> HandshakeRequest:
    """Return the offer of a client. Raises CodecError if ``data`` is no such frame."""
    return handshake.request_from_proto(parse(service_pb2.HandshakeRequest, data))


def pack_handshake_request(offer: HandshakeRequest) -> bytes:
    return service_pb2.HandshakeRequest(base=handshake.offer_to_base(offer)).SerializeToString()


def parse_handshake_response(data: bytes) -> HandshakeResponse:
    """Return the answer of a server. Raises CodecError if ``data`` is no such frame."""
    return handshake.response_from_proto(parse(service_pb2.HandshakeResponse, data), None)


def pack_handshake_response(answer: HandshakeResponse) -> bytes:
    return service_pb2.HandshakeResponse(base=handshake.answer_to_base(answer)).SerializeToString()
