"""The frames of LaneService: calls into the environments of a session.

Arguments arrive as they are, or are refused before they are sent. Results are encoded as infos are.
Functions that parse raise CodecError.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.messages import EnvErrorCode
from rlmesh_ray.wire._pb.rlmesh_ray.lanes.v1 import service_pb2 as pb
from rlmesh_ray.wire.protobuf import as_utf8, few, parse
from rlmesh_ray.wire.rlmesh_v1.meta import (
    InputEncoder,
    check_peer_nodes,
    decode_value,
    encode_meta,
)

SERVICE = "rlmesh_ray.lanes.v1.LaneService"
CALL = f"/{SERVICE}/Call"

MAX_ARGUMENT_BYTES = 2**19
"""Most bytes of text, bytes and arrays in the arguments of a call, so that the frame is below the
endpoint's limit (``limits.max_request_bytes``)."""
MAX_ARGUMENT_VALUES = 2**12
"""Most single values in the arguments; an array counts as 5, and its number of axes."""

_KEY = "values"


@dataclass(frozen=True, slots=True)
class LaneCall:
    """CallRequest: call an attribute of the lanes' environments."""

    name: str
    arguments: tuple[object, ...] = ()
    """Positional arguments."""
    lanes: tuple[int, ...] = ()
    """Lane indices; empty: all lanes."""
    num_requests: int = 0
    """Number of requests of the session that are executed before the call."""
    timeout_ms: int = 0
    """0: no deadline."""


@dataclass(frozen=True, slots=True)
class CallFailed:
    """CallResponse.error: the call failed."""

    code: EnvErrorCode
    message: str
    debug_info: str = ""


def pack_call(call: LaneCall) -> bytes:
    """Return the frame of ``call``, whose tuples arrive as lists; raises CodecError."""
    try:
        message = pb.CallRequest(
            name=as_utf8(call.name),
            env_indices=call.lanes,
            num_requests=call.num_requests,
            timeout_ms=call.timeout_ms,
        )
    except (TypeError, ValueError) as error:
        raise CodecError(f"the call has no wire form: {error}") from error
    encoder = InputEncoder(
        "the arguments",
        tag_arrays=True,
        max_bytes=MAX_ARGUMENT_BYTES,
        max_values=MAX_ARGUMENT_VALUES,
    )
    for index, argument in enumerate(call.arguments):
        encoder.fill(message.arguments.items.add(), argument, f"argument {index}", 1)
    return message.SerializeToString()


def parse_call(data: bytes) -> LaneCall:
    message = parse(pb.CallRequest, data)
    check_peer_nodes(message.arguments)
    return LaneCall(
        message.name,
        tuple(map(decode_value, message.arguments.items)),
        few(message.env_indices, "lanes"),
        message.num_requests,
        message.timeout_ms,
    )


def pack_response(outcome: Sequence[object] | CallFailed) -> bytes:
    """Return the frame of one result for each called lane, or of the failure."""
    message = pb.CallResponse()
    if isinstance(outcome, CallFailed):
        message.error.code = outcome.code.value  # type: ignore[assignment]  # enums are ints
        message.error.message = as_utf8(outcome.message)
        message.error.debug_info = as_utf8(outcome.debug_info)
        message.error.is_recoverable = True
    else:
        infos = encode_meta({_KEY: list(outcome)}, tag_arrays=True)
        message.results.CopyFrom(infos.entries[_KEY].list)
    return message.SerializeToString()


def parse_response(data: bytes) -> tuple[Any, ...] | CallFailed:
    message = parse(pb.CallResponse, data)
    match message.WhichOneof("kind"):
        case "results":
            return tuple(map(decode_value, message.results.items))
        case "error":
            code = EnvErrorCode(message.error.code)
            return CallFailed(code, message.error.message, message.error.debug_info)
    raise CodecError("the frame holds neither results nor an error")
