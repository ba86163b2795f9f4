"""The page in a real browser: a server in a thread, and Chromium through Playwright."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
"""Debian's; ``apt-get install chromium``."""


def lacking() -> str:
    """Return what a browser needs and this machine lacks; empty: nothing."""
    return "" if os.path.exists(CHROMIUM) else f"{CHROMIUM} (apt-get install chromium)"


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve an ASGI application; yield its URL."""
    import uvicorn

    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_level="error", lifespan="off", ws="none")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            thread.join(20.0)


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """Yield Playwright's browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield started
        finally:
            started.close()
