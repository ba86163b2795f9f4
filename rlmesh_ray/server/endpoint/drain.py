"""Draining: an endpoint stops without leaving a request unanswered."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

DRAINING = "draining: this endpoint takes no new sessions, dial another endpoint"
"""The refusal of a new session; see ``Gate``."""


class Drain:
    """Counts the pending requests of an endpoint. To be used in the serving loop only.

    Rule: once ``is_draining``, a session takes at most one request more, and ends when it has
    answered all that it took.
    """

    def __init__(self) -> None:
        self._num_pending = 0
        self.is_draining = False
        """Whether the endpoint is about to stop."""
        self._settled = asyncio.Event()
        self.preparations: list[Callable[[], Awaitable[None]]] = []
        """Awaited before the drain ends, for work that is not counted as requests."""

    def begin_request(self) -> None:
        self._num_pending += 1

    def end_request(self, count: int = 1) -> None:
        """Note that ``count`` requests were answered, or that their clients are gone."""
        self._num_pending -= count
        if self.is_draining and not self._num_pending:
            self._settled.set()

    @contextlib.contextmanager
    def request_in_progress(self) -> Iterator[None]:
        self.begin_request()
        try:
            yield
        finally:
            self.end_request()

    async def run(self) -> None:
        """Stop taking new requests, and wait until all pending ones are answered."""
        self.is_draining = True
        with self.request_in_progress():
            await asyncio.gather(*(preparation() for preparation in self.preparations))
        await self._settled.wait()
