"""Browsers that send half a request, or take no answer: each is cut off, and others are served."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rlmesh_ray.watch.page import MAX_WAITING, BrowserConnection, make_server
from tests.loopback.eventually import eventually

TIMEOUT_S = 60.0
NUM_HALVES = 300
HALF = b"GET / HTTP/1.1\r\nHost: here\r\n"
WHOLE = HALF + b"\r\n"


class Hasty(BrowserConnection):
    """Awaits its browser for a moment alone."""

    timeout_s = 0.1


class Site:
    """A server of an application of few paths, in a thread.

    Args:
        connection: Its connections.
    """

    def __init__(self, connection: type[BrowserConnection]) -> None:
        self.may_answer = threading.Event()
        self.waits = threading.Event()
        self.server = make_server(self, connection)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=NUM_HALVES)
        self._thread = threading.Thread(target=self.server.run, args=([self._listener],))
        self._thread.start()
        assert eventually(lambda: self.server.started)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request: late, without end, or at once."""
        message = await receive()
        while message.get("more_body"):
            message = await receive()
        if scope["path"] == "/late":
            self.waits.set()
            await asyncio.to_thread(self.may_answer.wait, TIMEOUT_S)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        more = {"type": "http.response.body", "body": bytes(2**20), "more_body": True}
        while scope["path"] == "/endless" and self.has_connections:
            await send(more)
        await send({"type": "http.response.body", "body": b"answered"})

    @property
    def has_connections(self) -> bool:
        """Whether a browser is connected."""
        return bool(self.server.server_state.connections)

    def browser(self, sent: bytes) -> socket.socket:
        """Return a connection on which so much has been sent."""
        connection = socket.create_connection(self._listener.getsockname(), TIMEOUT_S)
        connection.sendall(sent)
        return connection

    def close(self) -> None:
        """Stop it."""
        self.server.should_exit = True
        self._thread.join(TIMEOUT_S)
        self._listener.close()
        assert not self._thread.is_alive()


@pytest.fixture(name="site")
def _site() -> Iterator[Site]:
    with contextlib.closing(Site(BrowserConnection)) as site:
        yield site


@pytest.fixture(name="hasty")
def _hasty() -> Iterator[Site]:
    with contextlib.closing(Site(Hasty)) as site:
        yield site


def is_answered(site: Site) -> bool:
    with site.browser(WHOLE) as browser:
        return browser.recv(100).startswith(b"HTTP/1.1 200")


def is_cut_off(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(2**20):
            pass
    return True


def test_requests_that_are_half_sent_keep_no_other_from_being_answered(site: Site) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(NUM_HALVES):
            stack.enter_context(site.browser(HALF))

        assert is_answered(site)
        assert eventually(lambda: len(site.server.server_state.connections) <= MAX_WAITING)


@pytest.mark.parametrize(
    "sent", [b"", HALF, b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 9\r\n\r\nrest"]
)
def test_a_browser_that_does_not_end_its_request_is_cut_off_in_time(
    sent: bytes, hasty: Site
) -> None:
    with hasty.browser(sent) as browser:
        assert is_cut_off(browser)
    assert is_answered(hasty)


def test_a_browser_that_takes_no_answer_is_cut_off_in_time(hasty: Site) -> None:
    with hasty.browser(WHOLE.replace(b"/ ", b"/endless ", 1)):
        assert eventually(lambda: hasty.has_connections)
        assert eventually(lambda: not hasty.has_connections)
    assert is_answered(hasty)


def test_a_browser_that_waits_for_its_answer_is_not_cut_off(hasty: Site) -> None:
    with hasty.browser(WHOLE.replace(b"/ ", b"/late ", 1)) as waiting:
        assert hasty.waits.wait(TIMEOUT_S)
        with hasty.browser(HALF) as other:
            assert is_cut_off(other)  # the time is over
        hasty.may_answer.set()

        assert b"200" in waiting.recv(100)
