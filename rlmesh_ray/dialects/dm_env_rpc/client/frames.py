"""Frames of a dm_env_rpc client: requests to bytes, bytes to answers."""

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError

from rlmesh_ray.dialects.dm_env_rpc.client.settings import Settings
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import (
    MAX_SETTINGS_BYTES,
    error_details,
    pack_tensor,
    pb,
    properties,
)
from rlmesh_ray.errors import CodecError, ConfigurationError, RemoteEnvError, RemoteProtocolError
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.spaces.vector_infos import bounded_repr
from rlmesh_ray.wire.protobuf import varint

_CODES = {code.value[0]: code.name for code in grpc.StatusCode}
# Tags of EnvironmentRequest.step, StepRequest.actions, and the key and the value of an entry.
_STEP, _ACTIONS, _KEY, _VALUE = b"\x1a", b"\x0a", b"\x08", b"\x12"


_SCALARS = (bool, int, float, str, np.generic)
_ARRAYS = (np.ndarray, np.memmap)
"""Other subclasses would lose something, such as a mask."""
_KINDS = {
    "create_world",
    "join_world",
    "step",
    "reset",
    "leave_world",
    "destroy_world",
    "extension",
}
"""Kinds of the requests here, and of their answers: names of the payload."""


def request(**payload: Any) -> bytes:
    """Return a request, such as ``request(reset={"settings": as_tensors(settings)})``."""
    return bytes(pb.EnvironmentRequest(**payload).SerializeToString())


def reset_request(settings: Settings) -> bytes:
    return request(reset={"settings": as_tensors(settings)})


def read_request(key: str) -> bytes:
    extension = any_pb2.Any()
    extension.Pack(properties.PropertyRequest(read_property={"key": key}))
    return request(extension=extension)


def read_value(answer: Any) -> Any:
    """Return the ``pb.Tensor`` in the answer to a request for a property.

    Raises:
        RemoteProtocolError: There is none.
    """
    response = properties.PropertyResponse()
    try:
        is_one = answer.extension.Unpack(response)
    except DecodeError as error:
        raise RemoteProtocolError(f"the value of a property does not decode: {error}") from error
    if not is_one or response.WhichOneof("payload") != "read_property":
        raise RemoteProtocolError("the answer holds no value of a property")
    return response.read_property.value


def observed(uids: Iterable[int]) -> bytes:
    return bytes(pb.StepRequest(requested_observations=uids).SerializeToString())


def step_request(actions: Iterable[tuple[int, bytes]], requested: bytes) -> bytes:
    """Return the request for a step.

    Args:
        actions: Uids, and serialized tensors.
        requested: As ``observed`` returns it.
    """
    parts = []
    for uid, tensor in actions:
        entry = b"%b%b%b%b" % (_KEY, varint(uid), _VALUE, varint(len(tensor)))
        parts += [_ACTIONS, varint(len(entry) + len(tensor)), entry, tensor]
    parts.append(requested)
    body = b"".join(parts)
    return b"%b%b%b" % (_STEP, varint(len(body)), body)


def parse_answer(frame: bytes) -> Any:
    """Return the answer in a frame, a ``pb.EnvironmentResponse``.

    Raises:
        RemoteEnvError: The server refused the request.
        RemoteProtocolError: The frame is no answer.
    """
    try:
        response = pb.EnvironmentResponse.FromString(frame)
    except DecodeError as error:
        raise RemoteProtocolError(f"the answer does not decode: {error}") from error
    name = response.WhichOneof("payload")
    if name == "error":
        status = response.error
        code = _CODES.get(status.code, f"CODE_{status.code}")
        raise RemoteEnvError(code, status.message, True, _debug_info(status.details))
    if name not in _KINDS:
        raise RemoteProtocolError(f"the answer is {name or 'empty'}, which answers nothing here")
    return response


def kind_name(frame: bytes) -> str:
    """Return the kind of the answer in a frame, for a message; the frame may be malformed."""
    try:
        return pb.EnvironmentResponse.FromString(frame).WhichOneof("payload") or "empty"
    except DecodeError:
        return "it does not decode"


def as_tensors(settings: Settings) -> dict[str, Any]:
    """Return settings as ``pb.Tensor`` by name.

    Raises:
        ConfigurationError: One cannot be encoded.
    """
    tensors: dict[str, Any] = {}
    for name, value in _flat(settings):
        try:
            if name in tensors:
                raise CodecError("it is given twice")
            name.encode()  # protobuf wants text with a UTF-8 form
            _require_exact(value)
            tensors[name] = pack_tensor(value)
        # Values that no tensor can hold raise any of these.
        except (CodecError, AttributeError, RecursionError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"setting {name!r} = {bounded_repr(value):.80} cannot travel ({error}); write its "
                "name as text, and its value as numbers, text, or lists or arrays of one kind of "
                "them"
            ) from error
    return tensors


def _require_exact(value: Any) -> None:
    """Require a value that a tensor holds unchanged.

    Raises:
        CodecError: It is not an array, a number, text or a list of one kind of these.
        ValueError: It is a list of lists of different lengths.
    """
    if isinstance(value, (list, tuple)):
        array = np.asarray(value)
        parts = list(np.asarray(value, object).flat)
        dtypes = [np.asarray(part).dtype for part in parts]
        kinds = {"text" if dtype.kind == "U" else dtype.name for dtype in dtypes}
        are_floats = kinds == {"int64", "float64"} and all(float(each) == each for each in parts)
        if len(kinds) != 1 and not are_floats:
            raise CodecError(f"a list of {' and '.join(sorted(kinds)) or 'nothing'}")
    elif type(value) in _ARRAYS or isinstance(value, _SCALARS):
        array = np.asarray(value)
    else:
        raise CodecError(f"a {type(value).__name__}")
    if array.dtype == object and isinstance(array.flat[0], int):
        raise CodecError("it does not fit into 64 bits")


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in settings.items():
        if prefix and (not isinstance(key, str) or "." in key):
            raise ConfigurationError(
                f"{key!r:.40} of setting {prefix[:-1]!r} cannot travel as a name; write text "
                "without '.', or a mapping in the mapping"
            )
        name: Any = f"{prefix}{key}" if prefix else key
        if not isinstance(value, Mapping):
            yield name, value
        elif value or not prefix:
            yield from _flat(value, f"{name}.")
        else:
            raise ConfigurationError(f"setting {name!r} = {{}} cannot travel; leave it out")


def require_size(settings: Settings) -> None:
    """Require that one of this package's servers takes the settings of a reset.

    Raises:
        ConfigurationError: They are too large; the message names the largest.
    """
    size = len(reset_request(settings))
    if size > MAX_SETTINGS_BYTES:
        sizes = {len(reset_request({name: value})): name for name, value in _flat(settings)}
        raise ConfigurationError(
            f"the settings of the reset take {size} bytes, and the server takes "
            f"{MAX_SETTINGS_BYTES}; give less in {sizes[max(sizes)]!r}"
        )


def _debug_info(details: Iterable[Any]) -> str:
    texts = []
    for detail in details:
        info = error_details.DebugInfo()
        with contextlib.suppress(DecodeError):  # the refusal is raised without it
            if detail.Unpack(info):
                texts += [info.detail, *info.stack_entries]
    return "\n".join(text for text in texts if text)
