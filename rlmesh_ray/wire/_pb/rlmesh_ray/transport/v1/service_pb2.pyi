# mypy: ignore-errors
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class OpenTcpRequest(_message.Message):
    __slots__ = ("timeout_ms",)
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    def __init__(self, timeout_ms: _Optional[int] = ...) -> None: ...

class OpenTcpResponse(_message.Message):
    __slots__ = ("ticket_id", "key", "endpoint")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    ticket_id: bytes
    key: bytes
    endpoint: str
    def __init__(self, ticket_id: _Optional[bytes] = ..., key: _Optional[bytes] = ..., endpoint: _Optional[str] = ...) -> None: ...
