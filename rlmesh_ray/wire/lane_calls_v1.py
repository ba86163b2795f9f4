"""The frames of LaneService: calls into the environments of a session.

Arguments are validated before they are sent: one without a wire form would arrive as text, which
the environment might take for a value. Results are encoded as infos are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.messages import EnvErrorCode
from rlmesh_ray.spaces.spec import DTYPES
from rlmesh_ray.wire._pb.rlmesh.spaces.v1 import meta_pb2
from rlmesh_ray.wire._pb.rlmesh_ray.lanes.v1 import service_pb2 as pb
from rlmesh_ray.wire.protobuf import as_utf8, parse
from rlmesh_ray.wire.rlmesh_v1.meta import (
    ARRAY_KEY,
    check_peer_nodes,
    decode_meta,
    encode_meta,
)
from rlmesh_ray.wire.validation import few

SERVICE = "rlmesh_ray.lanes.v1.LaneService"
CALL = f"/{SERVICE}/Call"

MAX_ARGUMENT_BYTES = 2**19
"""Most bytes of text, bytes and arrays in the arguments of a call, so that the frame is below the
endpoint's limit (``limits.max_request_bytes``)."""
MAX_ARGUMENT_VALUES = 2**12
"""Most single values in the arguments; keys count, and an array counts as four."""

_MAX_DEPTH = 16
_KEY = "values"
_ARRAY_VALUES = 4
_INT64 = range(-(2**63), 2**63)
_ARRAY_DTYPES = frozenset({*DTYPES, "complex64", "complex128"})
_PLAIN = (bool, np.bool_, float, np.floating)
_REMEDY = "give numbers, text, bytes, arrays, and lists and dicts of these"


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
    """Return the frame of ``call``. Tuples among the arguments arrive as lists.

    Raises:
        CodecError: An argument has no wire form, all arguments together are too large, or a lane or
            the deadline does not fit its field.
    """
    budget = _ArgumentBudget()
    for index, argument in enumerate(call.arguments):
        budget.check(argument, f"argument {index}")
    try:
        message = pb.CallRequest(
            name=as_utf8(call.name),
            env_indices=call.lanes,
            num_requests=call.num_requests,
            timeout_ms=call.timeout_ms,
        )
    except (TypeError, ValueError) as error:
        raise CodecError(f"the call has no wire form: {error}") from error
    message.arguments.CopyFrom(_as_list(call.arguments))
    return message.SerializeToString()


def parse_call(data: bytes) -> LaneCall:
    """Return the call in ``data``.

    Raises:
        CodecError: ``data`` is no CallRequest, or has too many arguments or lanes.
    """
    message = parse(pb.CallRequest, data)
    check_peer_nodes(message.arguments)
    return LaneCall(
        message.name,
        tuple(_values(message.arguments)),
        few(message.env_indices, "lanes"),
        message.num_requests,
        message.timeout_ms,
    )


def pack_response(outcome: Sequence[object] | CallFailed) -> bytes:
    """Return the frame of the results, one for each called lane, or of the failure.

    Results without a wire form become text, as in infos.
    """
    message = pb.CallResponse()
    if isinstance(outcome, CallFailed):
        message.error.code = outcome.code.value  # type: ignore[assignment]  # enums are ints
        message.error.message = as_utf8(outcome.message)
        message.error.debug_info = as_utf8(outcome.debug_info)
        message.error.is_recoverable = True
    else:
        message.results.CopyFrom(_as_list(outcome))
    return message.SerializeToString()


def parse_response(data: bytes) -> tuple[Any, ...] | CallFailed:
    """Return the results or the failure in ``data``.

    Raises:
        CodecError: ``data`` holds neither.
    """
    message = parse(pb.CallResponse, data)
    match message.WhichOneof("kind"):
        case "results":
            return tuple(_values(message.results))
        case "error":
            codes = {code.value: code for code in EnvErrorCode}
            code = codes.get(message.error.code, EnvErrorCode.UNSPECIFIED)
            return CallFailed(code, message.error.message, message.error.debug_info)
    raise CodecError("the frame holds neither results nor an error")


def _as_list(values: Sequence[object]) -> meta_pb2.MetaList:
    return encode_meta({_KEY: list(values)}, tag_arrays=True).entries[_KEY].list


def _values(message: meta_pb2.MetaList) -> list[Any]:
    infos = meta_pb2.MetaMap()
    infos.entries[_KEY].list.CopyFrom(message)
    values: list[Any] = decode_meta(infos)[_KEY]
    return values


class _ArgumentBudget:
    """Validates the arguments of one call and counts their size."""

    def __init__(self) -> None:
        self._bytes_left = MAX_ARGUMENT_BYTES
        self._values_left = MAX_ARGUMENT_VALUES

    def check(self, value: object, place: str, depth: int = 0) -> None:
        """Require that ``value`` has a wire form and fits the budget.

        Raises:
            CodecError: It has none, or does not fit.
        """
        self._take()
        if value is None or isinstance(value, _PLAIN):
            return
        if isinstance(value, (int, np.integer)):
            if int(value) not in _INT64:
                raise CodecError(f"{place} does not fit into 64 bits; give a string")
        elif isinstance(value, (str, bytes)):
            self._take(0, 4 * len(value) if isinstance(value, str) else len(value))
        elif isinstance(value, np.ndarray) and value.dtype.name in _ARRAY_DTYPES:
            self._take(_ARRAY_VALUES - 1, value.nbytes)
        elif isinstance(value, (list, tuple, Mapping)) and depth < _MAX_DEPTH:
            self._check_parts(value, place, depth + 1)
        else:
            name = type(value).__name__
            raise CodecError(f"{place}, of type {name}, cannot be sent or is too deep; {_REMEDY}")

    def _check_parts(
        self, value: Sequence[object] | Mapping[object, object], place: str, depth: int
    ) -> None:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in items:
            if isinstance(value, Mapping):
                if not isinstance(key, str) or key == ARRAY_KEY:
                    raise CodecError(f"{place} has the key {key!r:.40}; give other text")
                self._take(1, 4 * len(key))
            self.check(part, f"{place}[{key!r:.40}]", depth)

    def _take(self, num_values: int = 1, num_bytes: int = 0) -> None:
        self._values_left -= num_values
        self._bytes_left -= num_bytes
        if min(self._values_left, self._bytes_left) < 0:
            raise CodecError(
                f"the arguments take more than {MAX_ARGUMENT_VALUES} values or "
                f"{MAX_ARGUMENT_BYTES >> 10} KiB; give an array in place of lists, or the name of "
                "something that the environment loads itself"
            )
