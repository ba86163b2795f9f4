"""The two loops of the raw client, on streams that end in this process."""

import asyncio
import random
from collections.abc import Callable

import grpc
import pytest

from rlmesh_ray.bench.arrivals import poisson
from rlmesh_ray.bench.closed_loop import ask_by_turns
from rlmesh_ray.bench.frames import EchoedFrames, OurFrames
from rlmesh_ray.bench.open_loop import ask_on_time
from rlmesh_ray.bench.streams import BadAnswerError, Stream, Tally, now_s
from rlmesh_ray.protocol.messages import ModelErrorCode, ModelFailed
from rlmesh_ray.wire.rlmesh_v1 import model as wire

ERROR = wire.pack_response(ModelFailed("id", ModelErrorCode.INTERNAL, "it broke", True))


# When the requests of ``open_loop`` are due.
ARRIVALS_S = poisson(1000.0, 0.05, random.Random("0/a"))


class Echo:
    """A call whose other end sends frames back, once it may.

    Args:
        holds: How many frames it waits for before it sends the first one back.
        limit: After how many answers the stream ends.
    """

    def __init__(self, *, holds: int = 1, limit: int = 10**9) -> None:
        self.frames: list[bytes] = []
        self.most_unanswered = 0
        self._holds = holds
        self._left = limit
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()

    async def write(self, frame: bytes) -> None:
        self.frames.append(frame)
        if len(self.frames) < self._holds:
            return
        for held in self.frames if len(self.frames) == self._holds else [frame]:
            self._queue.put_nowait(held)
        self.most_unanswered = max(self.most_unanswered, self._queue.qsize())

    async def read(self) -> object:
        self._left -= 1
        return await self._queue.get() if self._left >= 0 else grpc.aio.EOF

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    async def details(self) -> str:
        return "shutting down"


def test_the_closed_loop_keeps_one_request_of_each_route_in_flight() -> None:
    async def ask() -> tuple[Echo, Tally]:
        echo, tally = Echo(limit=10), Tally()
        with pytest.raises(BadAnswerError, match="UNAVAILABLE shutting down"):
            await ask_by_turns(Stream(echo, EchoedFrames(), ("a", "b")), 1, tally)
        return echo, tally

    echo, tally = asyncio.run(ask())

    assert len(tally.latencies_us) == 10
    assert echo.most_unanswered == 2
    requests = [EchoedFrames().request(route, 1, route) for route in ("a", "b")]
    assert echo.frames == requests * 6


@pytest.mark.parametrize("loop", ["closed", "open"])
def test_an_error_ends_the_measurement(loop: str) -> None:
    class Failing(Echo):
        async def read(self) -> object:
            return ERROR

    async def ask() -> None:
        stream = Stream(Failing(), OurFrames(), ("a",))
        if loop == "closed":
            await ask_by_turns(stream, 1, Tally())
        else:
            await ask_on_time(stream, 1, Tally(), rate_per_s=100.0, seconds=1.0, seed=0)

    with pytest.raises(BadAnswerError, match="answered with INTERNAL: it broke"):
        asyncio.run(ask())


def open_loop(echo: Echo, until: Callable[[Tally], bool]) -> Tally:
    """Let a thousand requests a second arrive for 50 ms."""

    async def ask() -> Tally:
        tally = Tally()
        stream = Stream(echo, EchoedFrames(), ("a",))
        asking = asyncio.ensure_future(
            ask_on_time(stream, 1, tally, rate_per_s=1000.0, seconds=0.05, seed=0)
        )
        async with asyncio.timeout(30.0):
            while not until(tally):  # noqa: ASYNC110  # lists tell nobody that they grow
                await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        return tally

    return asyncio.run(ask())


def test_who_arrives_during_a_stall_waits_from_the_arrival_on() -> None:
    # Nothing comes back before the 30th request.
    tally = open_loop(Echo(holds=30), lambda tally: len(tally.latencies_us) >= 30)

    for latency_us, due_s in zip(tally.latencies_us[:30], ARRIVALS_S, strict=False):
        assert latency_us >= (ARRIVALS_S[29] - due_s) * 1e6 - 1


def test_who_could_not_be_sent_on_time_waits_from_the_arrival_on() -> None:
    class SlowToTake(Echo):
        async def write(self, frame: bytes) -> None:
            if not self.frames:
                await asyncio.sleep(0.03)
            await super().write(frame)

    tally = open_loop(SlowToTake(), lambda tally: len(tally.latencies_us) >= 10)

    for latency_us, due_s in zip(tally.latencies_us[:10], ARRIVALS_S, strict=False):
        assert latency_us >= (ARRIVALS_S[0] + 0.03 - due_s) * 1e6 - 1
    assert tally.lags_us[1] >= (ARRIVALS_S[0] + 0.03 - ARRIVALS_S[1]) * 1e6 - 1


def test_who_is_never_answered_counts_with_the_time_waited() -> None:
    tally = open_loop(Echo(holds=10**9), lambda tally: len(tally.lags_us) >= 20)

    waited_us = tally.waited_us(now_s())

    assert tally.latencies_us == []
    assert len(waited_us) >= 20
    assert waited_us == sorted(waited_us, reverse=True)


def test_requests_of_the_open_loop_are_told_apart() -> None:
    echo = Echo()

    open_loop(echo, lambda tally: len(tally.latencies_us) >= 20)

    assert len(set(echo.frames)) == len(echo.frames)


def test_the_warm_up_is_forgotten() -> None:
    tally = Tally()
    tally.latencies_us.append(1)
    tally.lags_us.append(1)

    tally.begin()

    assert (tally.latencies_us, tally.lags_us) == ([], [])
