"""Staying awake for a client, in a time that the tests have made up."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from rlmesh_ray import polling
from rlmesh_ray.server.model import model_stream
from rlmesh_ray.server.model.model_stream import BusyPolledFrames
from rlmesh_ray.server.observe.counters import SessionCounters

A_WHILE = 100
"""Rounds of the loop in which all that is going to happen by itself happens."""


class Clock:
    """Advances 10 us with each turn of a loop that polls, and stands still otherwise."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_turns = 0

    def perf_counter(self) -> float:
        return self.now_s

    def sched_yield(self) -> None:
        self.num_turns += 1
        self.now_s += 1e-5


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(polling, "time", clock)
    monkeypatch.setattr(model_stream, "time", clock)
    monkeypatch.setattr(model_stream, "os", clock)
    return clock


class Client:
    """Sends the frames of a stream, each when the test releases it."""

    def __init__(self, clock: Clock) -> None:
        self.counts = SessionCounters()
        self.counts.note_opened()
        self._clock = clock
        self._sent: asyncio.Queue[bytes] = asyncio.Queue()
        self._heard = BusyPolledFrames(self._frames(), self.counts)

    async def sends_after(self, seconds: float) -> int:
        """Have the next frame come after so long; return the turns until it was heard."""
        begun_s, before = self._clock.now_s, self._clock.num_turns
        polling = asyncio.ensure_future(anext(self._heard))
        for _ in range(A_WHILE):
            await asyncio.sleep(0)
        turns = self._clock.num_turns - before
        self._clock.now_s = begun_s + seconds
        self._sent.put_nowait(b"frame")
        assert await polling == b"frame"
        return turns

    async def _frames(self) -> AsyncIterator[bytes]:
        while True:
            yield await self._sent.get()


def test_a_client_that_is_quick_to_ask_finds_the_loop_awake(clock: Clock) -> None:
    async def scenario() -> list[int]:
        client = Client(clock)
        return [await client.sends_after(200e-6) for _ in range(40)]

    turns = asyncio.run(scenario())

    assert turns[0] == 0
    # For half as long again as it usually takes, and no longer: then the loop sleeps.
    assert 29 <= turns[-1] <= 31


def test_the_loop_sleeps_while_a_client_takes_its_time(clock: Clock) -> None:
    async def scenario() -> int:
        client = Client(clock)
        for _ in range(40):
            await client.sends_after(200e-6)
        for _ in range(40):
            await client.sends_after(20e-3)
        return await client.sends_after(20e-3)

    assert asyncio.run(scenario()) == 0


def test_without_spin_the_loop_always_sleeps(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLMESH_RAY_SPIN", "0")

    async def scenario() -> int:
        client = Client(clock)
        for _ in range(40):
            await client.sends_after(200e-6)
        return await client.sends_after(200e-6)

    assert asyncio.run(scenario()) == 0


def test_the_loop_does_not_stay_awake_for_one_of_several_clients(clock: Clock) -> None:
    async def scenario() -> list[int]:
        client = Client(clock)
        for _ in range(40):
            await client.sends_after(200e-6)
        client.counts.note_opened()
        await client.sends_after(200e-6)
        return [await client.sends_after(200e-6) for _ in range(3)]

    assert asyncio.run(scenario()) == [0, 0, 0]
