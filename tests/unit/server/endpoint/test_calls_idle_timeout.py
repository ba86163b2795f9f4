"""How long a client may say nothing: the timer is the loop's, and the test moves its clock."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from rlmesh_ray.server.endpoint.calls import IdleTimeout
from tests.unit.server.endpoint.jumping_loop import JumpingLoop


def run(work: Callable[[JumpingLoop], Awaitable[None]]) -> None:
    loop = JumpingLoop()
    try:
        loop.run_until_complete(asyncio.wait_for(work(loop), 1000.0))
    finally:
        loop.close()


async def after(*pauses_s: float) -> AsyncIterator[bytes]:
    """Yield a message after each pause, and then none for a long time."""
    for pause_s in (*pauses_s, 500.0):
        await asyncio.sleep(pause_s)
        yield b"frame"


async def heard(
    idle_timeout: IdleTimeout, frames: AsyncIterator[bytes], work_s: float = 0.0
) -> int:
    count = 0
    async for _ in idle_timeout.watch(frames):
        count += 1
        await asyncio.sleep(work_s)
    idle_timeout.stop()
    return count


def test_the_messages_end_when_none_has_come_for_so_long() -> None:
    async def work(loop: JumpingLoop) -> None:
        idle_timeout = IdleTimeout(10.0)

        assert await heard(idle_timeout, after(9.0, 9.5, 0.0)) == 3
        assert idle_timeout.has_expired
        assert 100.0 + 18.5 + 10.0 <= loop.now_s < 100.0 + 18.5 + 10.1

    run(work)


def test_the_time_without_a_reader_does_not_count() -> None:
    async def work(_: JumpingLoop) -> None:
        idle_timeout = IdleTimeout(10.0)

        assert await heard(idle_timeout, after(1.0, 1.0, 1.0), work_s=25.0) == 3

    run(work)


def test_other_signs_of_life_count() -> None:
    async def work(loop: JumpingLoop) -> None:
        begun_s = loop.now_s
        seen = [0]

        def has_stepped() -> bool:
            seen.append(min(int(loop.now_s - begun_s), 95))
            return seen[-1] != seen[-2]

        idle_timeout = IdleTimeout(10.0, has_stepped)

        assert await heard(idle_timeout, after()) == 0
        # The last step came after 95 s, and was seen at most one timeout later.
        assert 105.0 <= loop.now_s - begun_s <= 115.0

    run(work)


def test_without_a_timeout_the_messages_are_as_they_were() -> None:
    async def work(_: JumpingLoop) -> None:
        frames = after(1.0)
        idle_timeout = IdleTimeout(None)

        assert idle_timeout.watch(frames) is frames
        idle_timeout.stop()
        assert not idle_timeout.has_expired

    run(work)


def test_a_reader_that_its_owner_cancels_is_cancelled() -> None:
    async def work(_: JumpingLoop) -> None:
        idle_timeout = IdleTimeout(10.0)
        reading = asyncio.ensure_future(heard(idle_timeout, after()))
        await asyncio.sleep(1.0)
        reading.cancel()

        await asyncio.wait({reading})
        assert reading.cancelled()
        assert not idle_timeout.has_expired
        idle_timeout.stop()

    run(work)
