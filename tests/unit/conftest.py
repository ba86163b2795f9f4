"""Unit tests touch no network, no Ray and no clock."""

import socket
import time

import pytest


@pytest.fixture(autouse=True)
def no_sockets_and_no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a unit test must not do this")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "bind", refuse)
    monkeypatch.setattr(time, "sleep", refuse)
