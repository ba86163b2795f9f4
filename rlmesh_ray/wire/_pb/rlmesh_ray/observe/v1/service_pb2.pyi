# mypy: ignore-errors
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[Session]
    def __init__(self, sessions: _Optional[_Iterable[_Union[Session, _Mapping]]] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("name", "peer", "since_ns", "dialect", "transport", "episode_ids", "step_counts", "cumulative_rewards", "num_steps", "num_lane_steps", "num_resets", "num_episodes", "num_deviations")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    SINCE_NS_FIELD_NUMBER: _ClassVar[int]
    DIALECT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    EPISODE_IDS_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_REWARDS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_LANE_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESETS_FIELD_NUMBER: _ClassVar[int]
    NUM_EPISODES_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVIATIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    peer: str
    since_ns: int
    dialect: str
    transport: str
    episode_ids: _containers.RepeatedScalarFieldContainer[str]
    step_counts: _containers.RepeatedScalarFieldContainer[int]
    cumulative_rewards: _containers.RepeatedScalarFieldContainer[float]
    num_steps: int
    num_lane_steps: int
    num_resets: int
    num_episodes: int
    num_deviations: int
    def __init__(self, name: _Optional[str] = ..., peer: _Optional[str] = ..., since_ns: _Optional[int] = ..., dialect: _Optional[str] = ..., transport: _Optional[str] = ..., episode_ids: _Optional[_Iterable[str]] = ..., step_counts: _Optional[_Iterable[int]] = ..., cumulative_rewards: _Optional[_Iterable[float]] = ..., num_steps: _Optional[int] = ..., num_lane_steps: _Optional[int] = ..., num_resets: _Optional[int] = ..., num_episodes: _Optional[int] = ..., num_deviations: _Optional[int] = ...) -> None: ...

class RenderRequest(_message.Message):
    __slots__ = ("name", "lane")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    name: str
    lane: int
    def __init__(self, name: _Optional[str] = ..., lane: _Optional[int] = ...) -> None: ...

class RenderResponse(_message.Message):
    __slots__ = ("png",)
    PNG_FIELD_NUMBER: _ClassVar[int]
    png: bytes
    def __init__(self, png: _Optional[bytes] = ...) -> None: ...

class StatisticsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatisticsResponse(_message.Message):
    __slots__ = ("endpoints",)
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    endpoints: _containers.RepeatedCompositeFieldContainer[EndpointStatistics]
    def __init__(self, endpoints: _Optional[_Iterable[_Union[EndpointStatistics, _Mapping]]] = ...) -> None: ...

class EndpointStatistics(_message.Message):
    __slots__ = ("endpoint_id", "address", "incarnation", "service", "counters")
    ENDPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    endpoint_id: str
    address: str
    incarnation: int
    service: str
    counters: str
    def __init__(self, endpoint_id: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[int] = ..., service: _Optional[str] = ..., counters: _Optional[str] = ...) -> None: ...
