"""The page and its JSON over HTTP: an ASGI application, and the server that runs it.

Every page is static; what it shows comes from ``/api/``, which needs the page's token where there
is one. Without a token only names of this machine are answered, so that no other site's page can
read it by a name that it has pointed here (DNS rebinding). Nothing here changes anything.
"""

import asyncio
import json
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Set
from importlib.resources import files
from typing import Any, BinaryIO

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rlmesh_ray.auth.token_file import TokenSource, TokenStore
from rlmesh_ray.errors import RlmeshError
from rlmesh_ray.watch.live import PICTURE_SHARE, PICTURES_PER_S, LiveView, Picture
from rlmesh_ray.watch.runs import RunFolder

_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_HEADERS = {
    b"content-security-policy": b"default-src 'self'; img-src 'self' blob: data:; "
    b"object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    b"cross-origin-resource-policy": b"same-origin",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
}


def page(
    live: LiveView, runs: RunFolder, token: TokenSource | None = None, host: str = "127.0.0.1"
) -> ASGIApp:
    """Return the application.

    Args:
        live: Endpoints and sessions.
        runs: Trainings and recordings.
        token: The token of the page, or a file with such tokens; None: it is for this machine.
        host: Where it listens.

    Raises:
        ConfigurationError: The token, or its file, cannot be used.
    """
    answers = _answers(live, runs)

    def answer(request: Request) -> Response:  # in a thread: it may block
        make = answers.get(request.path_params["name"])
        try:
            found = None if make is None else make(defaultdict(str, request.query_params))
        except RlmeshError as error:
            return PlainTextResponse(str(error), 409)
        if found is None:
            return PlainTextResponse("there is no such thing (any more)", 404)
        return found if isinstance(found, Response) else _json(found)

    static = StaticFiles(directory=str(files("rlmesh_ray.watch") / "static"), html=True)
    routes = [Route("/api/{name}", answer), Mount("/", static)]
    tokens = None if token is None else TokenStore(token)
    return PageGuard(Starlette(routes=routes), tokens, _LOCAL_NAMES | {host})


def _answers(live: LiveView, runs: RunFolder) -> dict[str, Callable[[Mapping[str, str]], object]]:
    """Return what makes each answer below ``/api/``: JSON or a response; None: not found.

    A value that a request does not give is an empty text.
    """
    pace = {"pictures_per_s": PICTURES_PER_S, "picture_share": PICTURE_SHARE}

    def picture(given: Mapping[str, str]) -> Response | None:
        return _picture(live.picture(given["endpoint"], given["session"], _number(given["lane"])))

    def episodes(given: Mapping[str, str]) -> object:
        order = given["order"] or "newest"
        return runs.episodes(given["recording"], order, _number(given["first"]))

    def video(given: Mapping[str, str]) -> Response | None:
        file = runs.video(given["recording"], given["episode"])
        return None if file is None else _OpenFile(file, "video/mp4")

    return {
        "endpoints": lambda _: {**live.endpoints(), **pace},
        "sessions": lambda given: live.sessions(given["endpoint"]),
        "picture": picture,
        "runs": lambda _: runs.overview(),
        "curve": lambda given: runs.curve(given["run"]),
        "episodes": episodes,
        "episode": lambda given: runs.episode(given["recording"], given["episode"]),
        "video": video,
    }


class PageGuard:
    """Refuses requests by foreign names or without the token; adds headers that restrict the page.

    Args:
        app: The application.
        tokens: Tokens of those who may read; None: every program of this machine may.
        local_names: Names of this machine.
    """

    def __init__(self, app: ASGIApp, tokens: TokenStore | None, local_names: Set[str]) -> None:
        self._app = app
        self._local_names = local_names
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_restricted(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = (pair for pair in message["headers"] if pair[0] not in _HEADERS)
                message["headers"] = [*own, *_HEADERS.items()]
            await send(message)

        app = self._refusal(Request(scope)) or self._app
        await app(scope, receive, send_restricted)

    def _refusal(self, request: Request) -> Response | None:
        is_api = request.scope["path"].startswith("/api/")
        if is_api and request.headers.get("sec-fetch-site") == "cross-site":
            return PlainTextResponse("another site's page may not read this", 403)
        if self._tokens is None:
            name = request.headers.get("host", "").lower()
            bare = name.rpartition(":")[0] if not name.endswith("]") and ":" in name else name
            if bare not in self._local_names:
                remedy = "open it as http://127.0.0.1:PORT, or give it a token (--page-token-file)"
                return PlainTextResponse(f"this page is for its own machine; {remedy}", 421)
        elif is_api and self._tokens.role_of(_shown_token(request)) is None:
            return PlainTextResponse("this page needs its token", 401)
        return None


def _shown_token(request: Request) -> bytes:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.encode()
    # A browser sends no header of the page's with its requests for a video.
    return request.query_params.get("token", "").encode()


class _OpenFile(FileResponse):
    """Sends a file that is open, even if its name is another file's by now, and closes it."""

    def __init__(self, file: BinaryIO, media_type: str) -> None:
        self._file = file
        # A name of the file itself; Windows has none.
        path = f"/dev/fd/{file.fileno()}" if os.name == "posix" else file.name
        super().__init__(path, media_type=media_type, stat_result=os.fstat(file.fileno()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


def _picture(picture: Picture | None) -> Response | None:
    if picture is None:
        return None
    headers = {"x-wait-s": f"{picture.wait_s:.3f}", "x-took-s": f"{picture.took_s:.4f}"}
    if picture.png is None:
        return PlainTextResponse(picture.problem, 409 if picture.problem else 204, headers)
    return Response(picture.png, 200, headers, "image/png")


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def _json(value: object) -> Response:
    """Return ``value``, with null for NaN and infinities, which JSON does not have."""
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return Response(json.dumps(finite), media_type="application/json")


# --- its server: uvicorn's, which by itself waits for a browser for ever -----------------

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
        super().connection_lost(exc)
        self._await_nothing()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_browser()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_browser()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_browser()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._await_browser()

    def _await_browser(self) -> None:
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
