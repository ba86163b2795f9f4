"""The responses of a model session: messages to bytes and back."""

from collections.abc import Callable, Iterable

from rlmesh_ray.dialects.released.protocol.model_messages import (
    AdapterPredicted,
    AdapterReleased,
    AdapterResolved,
    AnyAdapterResponse,
    EpisodesForgotten,
    GroupedPredicted,
    ModelTimings,
    ParticipantClosed,
)
from rlmesh_ray.dialects.released.wire.model_requests import context_from_proto, context_to_proto
from rlmesh_ray.dialects.released.wire.timings import with_numbers
from rlmesh_ray.protocol.messages import ModelErrorCode, ModelFailed
from rlmesh_ray.wire._pb.rlmesh_wire.model.v1 import interaction_pb2 as pb
from rlmesh_ray.wire.envelope import read_response
from rlmesh_ray.wire.protobuf import as_utf8, field, parse, varint

# The numbers differ from those of the edition.
_CODE_NUMBERS = {
    code: pb.ModelErrorCode.Value(f"MODEL_ERROR_CODE_{code.name}") for code in ModelErrorCode
}
_CODES = {number: code for code, number in _CODE_NUMBERS.items()}


def pack_response(response: AnyAdapterResponse) -> bytes:
    """Return the frame of ``response``."""
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
    """Return ``frame``, a response, with its timings."""
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
        case AdapterReleased():
            message.release_adapter.SetInParent()
        case ParticipantClosed():
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
    "release_adapter": lambda message: AdapterReleased(message.request_id),
    "close": lambda message: ParticipantClosed(message.request_id),
    "error": lambda message: _failed(message.request_id, message.error),
}
