"""Unit tests touch no network, no running Ray and no clock."""

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def no_sockets_and_no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_instead_of(function: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            # Threads that earlier tests have left running may go on.
            if threading.current_thread() is threading.main_thread():
                raise AssertionError("a unit test must not do this")
            return function(*args, **kwargs)

        return guarded

    monkeypatch.setattr(socket.socket, "connect", refuse_instead_of(socket.socket.connect))
    monkeypatch.setattr(socket.socket, "bind", refuse_instead_of(socket.socket.bind))
    monkeypatch.setattr(time, "sleep", refuse_instead_of(time.sleep))
