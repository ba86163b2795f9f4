"""The frames of ModelService: conversion between bytes and the messages of ``protocol``."""

import functools
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import repeat
from operator import attrgetter

from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.capabilities import ACTION_CHUNKS
from rlmesh_ray.protocol.messages import (
    BatchRun,
    CloseModel,
    CloseRoute,
    ConfigureRoute,
    MalformedRequest,
    ModelClosed,
    ModelErrorCode,
    ModelFailed,
    ModelRequest,
    ModelResponse,
    Predict,
    PredictContext,
    Predicted,
    PredictSlot,
    RouteClosed,
    RouteConfigured,
)
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire import protobuf
from rlmesh_ray.wire._pb.rlmesh.core.v1.telemetry_pb2 import OperationMetric, OperationTelemetry
from rlmesh_ray.wire._pb.rlmesh.model.v1 import interaction_pb2 as pb
from rlmesh_ray.wire._pb.rlmesh.model.v1 import service_pb2
from rlmesh_ray.wire.protobuf import as_utf8, field, value_head, varint
from rlmesh_ray.wire.rlmesh_v1.handshake import HandshakeFrames
from rlmesh_ray.wire.rlmesh_v1.specs import contract_from_proto, contract_to_proto

MAX_SLOTS = 2**16
"""Most slots of one request: as many as a session may have lanes."""

# --- the server's side of Join ---------------------------------------------------------


def _response_message(response: ModelResponse) -> pb.JoinResponse:
    message = pb.JoinResponse(request_id=response.request_id)
    match response:
        case RouteConfigured():
            message.configure_route.SetInParent()
        case RouteClosed():
            message.close_route.SetInParent()
        case ModelClosed():
            message.close.SetInParent()
        case ModelFailed():
            body = message.error
            body.code = response.code.value  # type: ignore[assignment]  # enums are ints
            body.message = as_utf8(response.message)
            body.is_recoverable = response.is_recoverable
            body.debug_info = as_utf8(response.debug_info)
    return message


def pack_response(response: ModelResponse) -> bytes:
    """Return the frame of ``response``.

    A prediction is encoded by hand, in a third of the time of the generated code; a test compares
    both for random responses.
    """
    if not isinstance(response, Predicted):
        return _response_message(response).SerializeToString()
    context = (
        response.mirror or _fill_context(pb.PredictContext(), response.context).SerializeToString()
    )
    action = response.action
    if response.later:
        # Raw elements and ValueLists can be joined so: the batches are one of all steps' rows.
        action = b"".join((action, *response.later))
    before, between = _around_context(len(context), len(action))
    telemetry = b""
    if response.run is not None:
        telemetry = pack_telemetry(response.run, response.queue_ns)
        telemetry = b"\xa2\x01%b%b" % (varint(len(telemetry)), telemetry)  # .telemetry
    request_id = field(b"\xaa\x01", response.request_id.encode())  # .request_id
    return b"%b%b%b%b%b%b" % (before, context, between, action, telemetry, request_id)


@functools.lru_cache(maxsize=256)
def _around_context(context: int, action: int) -> tuple[bytes, bytes]:
    """Return the bytes before the context of a ``PredictResponse``, and those before its action."""
    head = b"\x0a" + varint(context)  # PredictResponse.context
    between = value_head(b"\x12", action)  # PredictResponse.action
    size = len(head) + context + len(between) + action
    return b"\x12" + varint(size) + head, between  # JoinResponse.predict


def _configure_route(message: pb.JoinRequest) -> ConfigureRoute:
    body = message.configure_route
    has_contract = body.HasField("env_contract")
    contract = contract_from_proto(body.env_contract) if has_contract else None
    return ConfigureRoute(
        message.request_id, _context(body.context), contract, _horizon_in(contract)
    )


def _horizon_in(contract: EnvContract | None) -> int:
    horizon = 1 if contract is None else contract.metadata.get(ACTION_CHUNKS, 1)
    if type(horizon) is not int or horizon < 1:
        raise CodecError(
            f"the contract's {ACTION_CHUNKS} is {horizon!r:.40}; it must be a number of actions, 1 "
            "or more"
        )
    return horizon


def _predict(message: pb.JoinRequest) -> Predict:
    body = message.predict
    context, observation = body.context, body.observation.bytes.data
    # Kept as bytes: encoding it slot by slot would cost more than the whole prediction.
    mirror = context.SerializeToString()
    return Predict(message.request_id, _context(context), observation, mirror)


_REQUESTS: dict[str, Callable[[pb.JoinRequest], ModelRequest]] = {
    "configure_route": _configure_route,
    "predict": _predict,
    "close_route": lambda message: CloseRoute(
        message.request_id, _context(message.close_route.context), message.close_route.reason
    ),
    "close": lambda message: CloseModel(message.request_id, message.close.reason),
}

parse_request: Callable[[bytes], ModelRequest | MalformedRequest] = partial(
    protobuf.read_request, pb.JoinRequest, _REQUESTS
)
"""Returns the request in a frame. Never raises: every frame gets an in-band response."""


# --- the client's side of Join ---------------------------------------------------------


def pack_request(request: ModelRequest) -> bytes:
    try:
        message = pb.JoinRequest(request_id=request.request_id)
        match request:
            case Predict(context=context, observation=observation):
                _fill_context(message.predict.context, context)
                message.predict.observation.bytes.data = observation
            case ConfigureRoute(context=context, contract=contract, horizon=horizon):
                _fill_context(message.configure_route.context, context)
                if isinstance(contract, EnvContract):
                    if horizon > 1:
                        metadata = {**contract.metadata, ACTION_CHUNKS: horizon}
                        contract = replace(contract, metadata=metadata)
                    message.configure_route.env_contract.CopyFrom(contract_to_proto(contract))
            case CloseRoute(context=context, reason=reason):
                _fill_context(message.close_route.context, context)
                message.close_route.reason = reason
            case CloseModel(reason=reason):
                message.close.reason = reason
                message.close.SetInParent()
        return message.SerializeToString()
    except (TypeError, ValueError) as error:
        raise CodecError(f"{type(request).__name__} has no wire form: {error}") from error


def _failed(message: pb.JoinResponse) -> ModelFailed:
    body = message.error
    return ModelFailed(
        message.request_id,
        code=ModelErrorCode(body.code),
        message=body.message,
        is_recoverable=body.is_recoverable,
        debug_info=body.debug_info,
    )


def _predicted(message: pb.JoinResponse) -> Predicted:
    body = message.predict
    run, queue_ns = read_telemetry(message.telemetry)
    context = _context(body.context)
    return Predicted(message.request_id, context, body.action.bytes.data, run, queue_ns)


_RESPONSES: dict[str, Callable[[pb.JoinResponse], ModelResponse]] = {
    "configure_route": lambda message: RouteConfigured(message.request_id),
    "predict": _predicted,
    "close_route": lambda message: RouteClosed(message.request_id),
    "close": lambda message: ModelClosed(message.request_id),
    "error": _failed,
}

parse_response: Callable[[bytes], ModelResponse] = partial(
    protobuf.read_response, pb.JoinResponse, _RESPONSES
)
"""Returns the response in a frame. Raises CodecError for any other, or one of an unknown kind."""


def _context(message: pb.PredictContext) -> PredictContext:
    rows = message.slots
    if len(rows) == 1:
        return PredictContext(*_names(message), (_new(PredictSlot, _fields(rows[0])),))
    if len(rows) > MAX_SLOTS:
        raise CodecError(
            f"{len(rows)} slots, and {MAX_SLOTS} are the limit: ask in several requests"
        )
    # map() runs no Python code for each slot; a batch has one for each row.
    slots = tuple(map(_new, repeat(PredictSlot), map(_fields, rows)))
    return PredictContext(*_names(message), slots)


_names = attrgetter("session_id", "route_id", "request_id")
_fields = attrgetter(*PredictSlot._fields)
# Creates a PredictSlot in a third of the time of its constructor.
_new = tuple.__new__


def _fill_context(message: pb.PredictContext, context: PredictContext) -> pb.PredictContext:
    message.session_id, message.route_id = context.session_id, context.route_id
    message.request_id = context.request_id
    message.SetInParent()
    for slot in context.slots:
        message.slots.add(
            env_index=slot.env_index, episode_id=slot.episode_id, step=slot.step, reset=slot.reset
        )
    return message


HANDSHAKE = HandshakeFrames(service_pb2)


OPERATION = "predict"
POLICY_VERSION = "policy.version"
BATCH_ROWS = "predict.batch_rows"
FORWARD = "predict.forward"
QUEUE = "predict.queue"


def pack_telemetry(run: BatchRun, queue_ns: int) -> bytes:
    """Return the bytes of an ``OperationTelemetry``; a test compares it with the generated code."""
    forward, waited = varint(run.forward_ns), varint(queue_ns)
    # The metrics are a repeated field; those of the cached part come first.
    return b"%b\x1a%c%b\x18%b\x1a%c%b\x18%b" % (
        _of_policy(run.component_id, run.policy_version, run.num_rows),
        len(_FORWARD) + 1 + len(forward),
        _FORWARD,
        forward,
        len(_QUEUE) + 1 + len(waited),
        _QUEUE,
        waited,
    )


def read_telemetry(message: OperationTelemetry) -> tuple[BatchRun | None, int]:
    """Return the batch of a prediction, and the time in ns that the request had waited.

    The batch is None where the message has no policy version: another implementation sent it.
    """
    metrics = {metric.name: metric for metric in message.metrics}
    version = metrics.get(POLICY_VERSION)
    if version is None or version.WhichOneof("value") != "number":
        return None, 0
    run = BatchRun(
        policy_version=_whole(version.number),
        num_rows=_whole(metrics.get(BATCH_ROWS, _NO_METRIC).number),
        forward_ns=metrics.get(FORWARD, _NO_METRIC).duration_ns,
        component_id=message.component_id,
    )
    return run, metrics.get(QUEUE, _NO_METRIC).duration_ns


# Equal for all requests of a batch, and for most predictions of a single client.
@functools.lru_cache(maxsize=256)
def _of_policy(component_id: str, policy_version: int, num_rows: int) -> bytes:
    head = OperationTelemetry(operation=OPERATION, component_id=component_id).SerializeToString()
    return head + _number(_VERSION, policy_version) + _number(_ROWS, num_rows)


_VERSION, _ROWS, _FORWARD, _QUEUE = (
    OperationMetric(name=name).SerializeToString()
    for name in (POLICY_VERSION, BATCH_ROWS, FORWARD, QUEUE)
)


def _number(name: bytes, value: float) -> bytes:
    body = name + b"\x29" + struct.pack("<d", value)  # OperationMetric.number
    return b"\x1a%c%b" % (len(body), body)  # OperationTelemetry.metrics


_NO_METRIC = OperationMetric()


def _whole(number: float) -> int:
    # A peer may send NaN or infinity.
    return int(number) if abs(number) < 2**63 else 0
