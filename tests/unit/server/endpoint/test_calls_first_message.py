"""The first message of a stream is looked at, and nothing is lost of it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rlmesh_ray.server.endpoint.calls import PrependedStream, first_message

CONTEXT: Any = None  # no call is aborted


async def stream(*frames: bytes) -> AsyncIterator[bytes]:
    for frame in frames:
        yield frame


@pytest.mark.parametrize("frames", [(b"a",), (b"", b"b"), (b"a", b"b", b"c")])
def test_a_stream_is_whole_again_after_its_first_frame_was_taken(frames: tuple[bytes, ...]) -> None:
    async def play() -> list[bytes]:
        requests = stream(*frames)
        first = await first_message(requests, CONTEXT)
        assert first is not None
        return [frame async for frame in PrependedStream(first, requests)]

    assert asyncio.run(play()) == list(frames)


def test_who_has_the_first_frame_gets_the_others_by_going_on() -> None:
    async def play() -> tuple[bytes | None, list[bytes]]:
        requests = stream(b"a", b"b", b"c")
        return await first_message(requests, CONTEXT), [frame async for frame in requests]

    assert asyncio.run(play()) == (b"a", [b"b", b"c"])


def test_a_stream_may_end_before_it_has_begun() -> None:
    assert asyncio.run(first_message(stream(), CONTEXT)) is None
