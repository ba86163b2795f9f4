"""The HTTP server of the page: uvicorn's, which by itself waits for a browser for ever."""

import asyncio
import logging
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 256
"""At a time; a request on a further one is answered with 503."""
MAX_WAITING = 64
"""Connections at a time that wait for their browser; another one replaces the oldest."""
BROWSER_TIMEOUT_S = 30.0
"""How long a browser may take for a request, also for the next one, and for a part of an answer."""
MAX_HEADER_BYTES = 16 * 1024


class BrowserConnection(H11Protocol):
    """A connection that is cut off when its browser is awaited for too long."""

    timeout_s = BROWSER_TIMEOUT_S
    """How long it is awaited."""
    _deadline: asyncio.TimerHandle | None = None
    """Cuts it off; None: the browser is not awaited."""

    def connection_made(self, transport: Any) -> None:
        """Await the first request."""
        super().connection_made(transport)
        self._await_browser()
        waiting = [
            (each._deadline.when(), each)
            for each in self.connections
            if isinstance(each, BrowserConnection) and each._deadline is not None
        ]
        if len(waiting) > MAX_WAITING:
            min(waiting, key=lambda each: each[0])[1]._cut_off()

    def connection_lost(self, exc: Exception | None) -> None:
        """Await nothing more."""
        super().connection_lost(exc)
        self._await_nothing()

    def data_received(self, data: bytes) -> None:
        """Await the rest of a request, unless it is whole."""
        super().data_received(data)
        self._await_browser()

    def on_response_complete(self) -> None:
        """Await the next request."""
        super().on_response_complete()
        self._await_browser()

    def pause_writing(self) -> None:
        """Await that the browser takes what is written."""
        super().pause_writing()
        self._await_browser()

    def resume_writing(self) -> None:
        """Write more."""
        super().resume_writing()
        self._await_browser()

    def _await_browser(self) -> None:
        """Set the deadline, if it is the browser's turn and no deadline is set yet."""
        cycle = self.cycle
        is_asked = cycle is not None and not cycle.more_body and not cycle.response_complete
        if is_asked and not self.flow.write_paused:
            self._await_nothing()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.timeout_s, self._cut_off)

    def _await_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _cut_off(self) -> None:
        self._await_nothing()
        self.transport.abort()


def make_server(
    app: ASGIApp, connection: type[BrowserConnection] = BrowserConnection
) -> uvicorn.Server:
    """Return a server, which runs until Ctrl-C or SIGTERM."""
    config = uvicorn.Config(
        app,
        http=connection,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        log_config=None,  # uvicorn's would close the handlers of all other loggers
        log_level="error",
        lifespan="off",
        ws="none",
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)

    def is_shown(record: logging.LogRecord) -> bool:
        # Requests that outlast the first second of an exit are cancelled, which is not an error.
        error = record.exc_info and record.exc_info[1]
        return not server.should_exit or isinstance(error, Exception)

    logging.getLogger("uvicorn.error").addFilter(is_shown)
    return server
