"""What an endpoint really serves: every call of every protocol on its port, and who got in."""

import contextlib
from collections.abc import Callable
from typing import Any

import grpc
import pytest


class ServedCalls:
    """The calls that endpoints have been given to serve, in the order in which they were.

    Args:
        monkeypatch: Undoes the watching.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[str] = []
        """Full paths."""
        self.entered: list[str] = []
        """Those whose handlers have been looked for: the step before they run."""
        make = grpc.aio.server

        def watched(*arguments: Any, **options: Any) -> Any:
            server = make(*arguments, **options)
            add: Callable[..., None] = server.add_generic_rpc_handlers

            def note(handlers: Any) -> None:
                for handler in handlers:
                    self.paths += handler._method_handlers
                add(tuple(_Watched(handler, self.entered) for handler in handlers))

            server.add_generic_rpc_handlers = note
            return server

        monkeypatch.setattr(grpc.aio, "server", watched)


class _Watched(grpc.GenericRpcHandler):
    def __init__(self, inner: Any, entered: list[str]) -> None:
        self._inner = inner
        self._entered = entered

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        found = self._inner.service(details)
        if found is not None:
            self._entered.append(details.method)
        return found


Metadata = tuple[tuple[str, str], ...]


def ended_with(
    channel: grpc.Channel, path: str, metadata: Metadata = (), body: bytes = b""
) -> tuple[grpc.StatusCode, str, list[bytes]]:
    """Make a call of any kind; return its status, its details and what was answered."""
    call = channel.stream_stream(path)(iter([body]), metadata=metadata, timeout=20.0)
    answers: list[bytes] = []
    with contextlib.suppress(grpc.RpcError):
        answers += call
    return call.code(), call.details(), answers
