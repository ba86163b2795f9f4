# mypy: ignore-errors
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RefusalKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_KIND_UNSPECIFIED: _ClassVar[RefusalKind]
    REFUSAL_KIND_NOT_NOW: _ClassVar[RefusalKind]
    REFUSAL_KIND_NOT_LIKE_THIS: _ClassVar[RefusalKind]
    REFUSAL_KIND_REPLACED: _ClassVar[RefusalKind]
REFUSAL_KIND_UNSPECIFIED: RefusalKind
REFUSAL_KIND_NOT_NOW: RefusalKind
REFUSAL_KIND_NOT_LIKE_THIS: RefusalKind
REFUSAL_KIND_REPLACED: RefusalKind

class AttendRequest(_message.Message):
    __slots__ = ("pool", "endpoint_id", "host", "port", "version", "former_incarnation", "report")
    POOL_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FORMER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    pool: str
    endpoint_id: str
    host: str
    port: int
    version: str
    former_incarnation: int
    report: Report
    def __init__(self, pool: _Optional[str] = ..., endpoint_id: _Optional[str] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., version: _Optional[str] = ..., former_incarnation: _Optional[int] = ..., report: _Optional[_Union[Report, _Mapping]] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("version", "uptime_s", "sessions_open", "sessions_opened", "sessions_refused", "sessions_lost", "steps", "lane_steps", "resets", "episodes", "worker_restarts", "errors", "steps_by_duration", "step_seconds", "deviations", "transports", "others")
    class ErrorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class TransportsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class OthersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_OPEN_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_OPENED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_LOST_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LANE_STEPS_FIELD_NUMBER: _ClassVar[int]
    RESETS_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    WORKER_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    STEPS_BY_DURATION_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEVIATIONS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    version: str
    uptime_s: float
    sessions_open: int
    sessions_opened: int
    sessions_refused: int
    sessions_lost: int
    steps: int
    lane_steps: int
    resets: int
    episodes: int
    worker_restarts: int
    errors: _containers.ScalarMap[str, int]
    steps_by_duration: _containers.RepeatedScalarFieldContainer[int]
    step_seconds: float
    deviations: int
    transports: _containers.ScalarMap[str, int]
    others: _containers.ScalarMap[str, float]
    def __init__(self, version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., sessions_open: _Optional[int] = ..., sessions_opened: _Optional[int] = ..., sessions_refused: _Optional[int] = ..., sessions_lost: _Optional[int] = ..., steps: _Optional[int] = ..., lane_steps: _Optional[int] = ..., resets: _Optional[int] = ..., episodes: _Optional[int] = ..., worker_restarts: _Optional[int] = ..., errors: _Optional[_Mapping[str, int]] = ..., steps_by_duration: _Optional[_Iterable[int]] = ..., step_seconds: _Optional[float] = ..., deviations: _Optional[int] = ..., transports: _Optional[_Mapping[str, int]] = ..., others: _Optional[_Mapping[str, float]] = ...) -> None: ...

class AttendResponse(_message.Message):
    __slots__ = ("registered", "refusal")
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    registered: Registered
    refusal: Refusal
    def __init__(self, registered: _Optional[_Union[Registered, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ("incarnation", "address")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    address: str
    def __init__(self, incarnation: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("kind", "message")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    kind: RefusalKind
    message: str
    def __init__(self, kind: _Optional[_Union[RefusalKind, str]] = ..., message: _Optional[str] = ...) -> None: ...
