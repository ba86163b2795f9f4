"""Requests to an ASGI application, without a server."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LOCAL = {"host": "127.0.0.1:7080"}


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a request."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """What its body says."""
        return json.loads(self.body)


def fetch(
    app: Any,
    path: str,
    *,
    headers: Mapping[str, str] = LOCAL,
    method: str = "GET",
) -> Reply:
    """Send a request to an ASGI application; return the answer.

    Args:
        app: The application.
        path: Path and query.
        headers: Names in lower case.
        method: Method of the request.
    """
    bare, _, query = path.partition("?")
    scope = {
        "type": "http",
        "method": method,
        "path": bare,
        "raw_path": bare.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 7080),
        "http_version": "1.1",
    }
    messages: list[Any] = []
    requests = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Any:
        if not requests:
            await asyncio.Event().wait()  # the client stays
        return requests.pop()

    async def send(message: Any) -> None:
        messages.append(message)

    asyncio.run(app(scope, receive, send))
    start, *parts = messages
    return Reply(
        start["status"],
        {name.decode(): value.decode() for name, value in start["headers"]},
        b"".join(part.get("body", b"") for part in parts),
    )
