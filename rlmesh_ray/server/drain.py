"""How an endpoint stops without leaving a request unanswered."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator


class Drain:
    """Counts what an endpoint owes its clients. To be used in the serving loop only.

    Rule: once ``is_draining``, a session takes at most one request more, and ends when it has
    answered all that it took.
    """

    def __init__(self) -> None:
        self._num_pending = 0
        self._is_draining = False
        self._settled = asyncio.Event()
        self._preparations: list[Callable[[], Awaitable[None]]] = []

    def add_preparation(self, preparation: Callable[[], Awaitable[None]]) -> None:
        """Have ``preparation`` done before the drain is over: it waits for what is not counted."""
        self._preparations.append(preparation)

    @property
    def is_draining(self) -> bool:
        """Whether the endpoint is about to stop."""
        return self._is_draining

    def begin_request(self) -> None:
        """Note that a request was taken."""
        self._num_pending += 1

    def end_request(self, count: int = 1) -> None:
        """Note that ``count`` requests were answered, or have lost whoever waited for them."""
        self._num_pending -= count
        self._look()

    @contextlib.contextmanager
    def request_in_progress(self) -> Iterator[None]:
        """Owe one answer within the context."""
        self.begin_request()
        try:
            yield
        finally:
            self.end_request()

    async def run(self) -> None:
        """Have the sessions take nothing new, and wait until every answer has been given."""
        self._is_draining = True
        with self.request_in_progress():
            await asyncio.gather(*(preparation() for preparation in self._preparations))
        await self._settled.wait()

    def _look(self) -> None:
        if self._is_draining and not self._num_pending:
            self._settled.set()
