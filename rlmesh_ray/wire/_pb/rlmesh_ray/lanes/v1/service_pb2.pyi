# mypy: ignore-errors
from rlmesh_ray.wire._pb.rlmesh.env.v1 import interaction_pb2 as _interaction_pb2
from rlmesh_ray.wire._pb.rlmesh.spaces.v1 import meta_pb2 as _meta_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CallRequest(_message.Message):
    __slots__ = ("name", "arguments", "env_indices", "num_requests", "timeout_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    ENV_INDICES_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    arguments: _meta_pb2.MetaList
    env_indices: _containers.RepeatedScalarFieldContainer[int]
    num_requests: int
    timeout_ms: int
    def __init__(self, name: _Optional[str] = ..., arguments: _Optional[_Union[_meta_pb2.MetaList, _Mapping]] = ..., env_indices: _Optional[_Iterable[int]] = ..., num_requests: _Optional[int] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class CallResponse(_message.Message):
    __slots__ = ("results", "error")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    results: _meta_pb2.MetaList
    error: _interaction_pb2.EnvError
    def __init__(self, results: _Optional[_Union[_meta_pb2.MetaList, _Mapping]] = ..., error: _Optional[_Union[_interaction_pb2.EnvError, _Mapping]] = ...) -> None: ...
