"""What a Join stream begins with, which tells the language that it goes on in."""

from collections.abc import AsyncIterator
from typing import NamedTuple


class FirstWords(NamedTuple):
    """The first message of a Join."""

    generation: str
    """Of the protocol."""
    frame: bytes


async def first_frame(requests: AsyncIterator[bytes]) -> bytes | None:
    """Take the first message off a stream; None: the stream has ended without one.

    Who goes on with ``async for`` gets the messages after it.
    """
    return await anext(aiter(requests), None)


class Resumed:
    """All messages of a stream, of which the first has been taken off.

    No generator: one that is left in the middle has to be closed, in a task of its own.
    """

    def __init__(self, first: bytes, rest: AsyncIterator[bytes]) -> None:
        self._first: bytes | None = first
        self._rest = aiter(rest)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        first, self._first = self._first, None
        return first if first is not None else await anext(self._rest)
