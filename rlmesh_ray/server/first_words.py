"""What a Join stream begins with, which tells the language that it goes on in."""

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

from rlmesh_ray.rpc import grpc
from rlmesh_ray.server.limits import FIRST_WORDS_S


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


async def first_words(
    requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext, *, is_known: bool = False
) -> bytes | None:
    """Take the first message off a stream, if it comes soon; see ``first_frame``.

    Args:
        requests: The stream's messages.
        context: Of its call, which is aborted else.
        is_known: Whether the client has shaken hands: then it may be building whatever it wants
            to say it with, and takes its time.
    """
    try:
        async with asyncio.timeout(None if is_known else FIRST_WORDS_S):
            return await first_frame(requests)
    except TimeoutError:
        reason = f"this stream has said nothing for {FIRST_WORDS_S:g} s; open it when it is needed"
        await context.abort(grpc.StatusCode.ABORTED, reason)
        raise  # never reached: abort raises


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
