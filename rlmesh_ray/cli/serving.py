"""How serve-env and serve-model live: announce, wait, end cleanly on a signal."""

import contextlib
from collections.abc import Callable
from typing import Protocol

from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.logs import show_log
from rlmesh_ray.server.heap import settle_heap
from rlmesh_ray.server.log_format import LogFormat

_POLL_S = 0.5


class Server(Protocol):
    """What both servers have in common."""

    @property
    def address(self) -> str:
        """Where it listens, once it does."""

    def start(self) -> object:
        """Listen."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it has stopped."""

    def stop(self, grace_s: float = 1.0) -> None:
        """End the sessions."""


def serve(
    console: Console,
    server: Server,
    announce: Callable[[], None],
    log_format: LogFormat = LogFormat.TEXT,
) -> None:
    """Start ``server``, call ``announce`` once it accepts, and serve until a signal ends it.

    Ctrl-C and SIGTERM end it in the same way: running calls get a second.
    """
    show_log(log_format)
    # Programs read standard error, too.
    console.people.quiet = log_format is LogFormat.JSON and console.is_json
    with contextlib.suppress(KeyboardInterrupt):
        server.start()
        settle_heap()
        try:
            announce()
            # Polled: on Windows no signal ends a wait.
            while not server.wait(_POLL_S):
                pass
        finally:
            server.stop(grace_s=1.0)
            console.event("stopped", address=server.address)
