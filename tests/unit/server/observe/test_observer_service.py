"""The rate limits of observers, and the refusals."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol.env_session import Failure, FailureKind, RenderOutcome
from rlmesh_ray.server.endpoint.gate import Drain
from rlmesh_ray.server.endpoint.handshake_service import ServiceOptions
from rlmesh_ray.server.endpoint.log import logged_as
from rlmesh_ray.server.env.connection_broker import ConnectionBroker
from rlmesh_ray.server.env.env_service import EnvService
from rlmesh_ray.server.observe.observer_service import (
    MAX_A_SECOND,
    PictureLimits,
    StatisticsService,
    TokenBucket,
)
from rlmesh_ray.wire import observe_v1 as wire
from tests.unit.server.env.slow_session import SlowSession, contract


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_so_many_happen_a_second_and_as_many_at_once_after_a_pause() -> None:
    clock = Clock()
    bucket = TokenBucket(4, clock)

    assert [bucket.take() for _ in range(5)] == [True] * 4 + [False]
    clock.now_s += 0.24
    assert not bucket.take()
    clock.now_s += 0.01
    assert [bucket.take() for _ in range(2)] == [True, False]
    clock.now_s += 3600.0
    assert [bucket.take() for _ in range(5)] == [True] * 4 + [False]


class Refused(Exception):
    """Raised by a call's ``abort``."""


class Context:
    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Refused(code.name, details)


class Endpoint:
    """A service with one session of two lanes, whose pictures wait for its ``gate``."""

    def __init__(self, render_mode: str = "rgb_array") -> None:
        self.clock = Clock()
        pool: Any = SimpleNamespace(steps_subsets=True)
        self.service = EnvService(
            pool,
            contract(render_mode),
            ServiceOptions(),
            Drain(),
            ConnectionBroker(has_shared_memory=False),
            clock=self.clock,
        )
        self.session = SlowSession()
        self.session.pictures = PictureLimits(self.clock)
        self.name = "session"
        with logged_as("endpoint", self.name):
            self.service.sessions.add(self.session)

    def end(self) -> None:
        self.service.sessions.end(self.session)

    async def render(self, lane: int = 0, name: str = "") -> bytes:
        context: Any = Context()
        data = wire.pack_render_request(name or self.name, lane)
        return wire.parse_png(await self.service.render(data, context))


Scenario = Callable[[Endpoint], Coroutine[Any, Any, None]]


def play(scenario: Scenario, **options: str) -> None:
    async def run() -> None:
        await scenario(Endpoint(**options))

    asyncio.run(run())


async def settle() -> None:
    for _ in range(9):
        await asyncio.sleep(0)


def test_a_session_is_drawn_so_many_times_a_second() -> None:
    async def scenario(endpoint: Endpoint) -> None:
        endpoint.session.gate.set()
        for _ in range(MAX_A_SECOND):
            assert await endpoint.render(1) == b"png"
        with pytest.raises(Refused, match=r"RESOURCE_EXHAUSTED.*10 pictures a second.*less often"):
            await endpoint.render(1)
        endpoint.clock.now_s += 1 / MAX_A_SECOND + 1e-6
        assert await endpoint.render(1) == b"png"
        assert endpoint.session.drawn == [1] * (MAX_A_SECOND + 1)

    play(scenario)


def test_pictures_take_a_part_of_a_session_s_time() -> None:
    clock = Clock()
    limits = PictureLimits(clock)

    assert not limits.objection(is_rendering=False)
    limits.note(0.1)
    clock.now_s += 0.89
    assert "pictures take a session 10% of its time" in limits.objection(is_rendering=False)
    clock.now_s += 0.02
    assert not limits.objection(is_rendering=False)


def test_sessions_are_listed_so_many_times_a_second() -> None:
    async def scenario(endpoint: Endpoint) -> None:
        endpoint.end()
        context: Any = Context()
        for _ in range(MAX_A_SECOND):
            assert await endpoint.service.list(b"", context) == b""
        with pytest.raises(Refused, match=r"RESOURCE_EXHAUSTED.*10 lists of sessions a second"):
            await endpoint.service.list(b"", context)
        endpoint.clock.now_s += 1.0
        assert await endpoint.service.list(b"", context) == b""

    play(scenario)


def test_statistics_are_told_so_many_times_a_second() -> None:
    async def run() -> None:
        clock, context = Clock(), Context()
        service = StatisticsService(lambda: [wire.EndpointStatistics("env", {"steps": 3})], clock)
        asked: Any = context
        for _ in range(MAX_A_SECOND):
            (parsed,) = wire.parse_statistics(await service.statistics(b"", asked))
            assert parsed.counters == {"steps": 3}
        with pytest.raises(Refused, match=r"RESOURCE_EXHAUSTED.*10 times a second"):
            await service.statistics(b"", asked)

    asyncio.run(run())


def test_a_session_renders_one_picture_at_a_time_also_for_a_caller_that_left() -> None:
    async def scenario(endpoint: Endpoint) -> None:
        drawing = asyncio.ensure_future(endpoint.render())
        await settle()
        with pytest.raises(Refused, match=r"RESOURCE_EXHAUSTED.*is being rendered"):
            await endpoint.render()
        drawing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await drawing
        with pytest.raises(Refused, match=r"RESOURCE_EXHAUSTED.*is being rendered"):
            await endpoint.render()
        endpoint.session.gate.set()
        await settle()
        assert await endpoint.render() == b"png"

    play(scenario)


def test_a_request_waits_for_the_picture_before_it_and_a_picture_is_no_sign_of_life() -> None:
    async def scenario(endpoint: Endpoint) -> None:
        drawing = asyncio.ensure_future(endpoint.render())
        await settle()
        asking = asyncio.ensure_future(endpoint.session.answer(b"step"))
        await settle()
        assert not asking.done()
        assert not endpoint.session.calls
        endpoint.session.gate.set()
        assert await asking == b"step"
        assert await drawing == b"png"

    play(scenario)


def test_a_caller_that_leaves_before_its_turn_costs_the_session_nothing() -> None:
    async def scenario(endpoint: Endpoint) -> None:
        asking = asyncio.ensure_future(endpoint.session.answer(b"step"))
        await settle()
        drawing = asyncio.ensure_future(endpoint.render())
        await settle()
        drawing.cancel()
        await settle()
        endpoint.session.gate.set()
        await asking
        await settle()
        assert endpoint.session.drawn == []

    play(scenario)


def test_the_end_of_a_session_ends_its_pictures() -> None:
    async def scenario(endpoint: Endpoint) -> None:
        drawing = asyncio.ensure_future(endpoint.render())
        await settle()
        endpoint.end()
        for asked in (drawing, endpoint.render()):
            with pytest.raises(Refused, match="NOT_FOUND"):
                await asked

    play(scenario)


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (Failure(FailureKind.RAISED, "no display"), "no picture to give: no display"),
        (RenderOutcome(None), "rendered nothing of lane 0"),
    ],
)
def test_a_refusal_gives_the_reason_why_there_is_no_picture(outcome: Any, why: str) -> None:
    async def scenario(endpoint: Endpoint) -> None:
        endpoint.session.picture = outcome
        endpoint.session.gate.set()
        with pytest.raises(Refused, match=f"FAILED_PRECONDITION.*{why}"):
            await endpoint.render()

    play(scenario)


def test_what_cannot_be_drawn_is_refused_before_the_session_hears_of_it() -> None:
    async def scenario(endpoint: Endpoint) -> None:
        with pytest.raises(Refused, match=r"INVALID_ARGUMENT.*lane 2 is not in \[0, 2\)"):
            await endpoint.render(2)
        with pytest.raises(Refused, match="NOT_FOUND"):
            await endpoint.render(0, "another")
        context: Any = Context()
        with pytest.raises(Refused, match="INVALID_ARGUMENT"):
            await endpoint.service.render(b"\xff", context)
        assert endpoint.session.drawn == []

    play(scenario)


@pytest.mark.parametrize(("mode", "shown"), [("", "none"), ("human", "human")])
def test_an_environment_without_pictures_is_refused(mode: str, shown: str) -> None:
    async def scenario(endpoint: Endpoint) -> None:
        with pytest.raises(
            Refused,
            match=f"FAILED_PRECONDITION.*render mode {shown}, which gives no pictures; serve",
        ):
            await endpoint.render()
        assert endpoint.session.drawn == []

    play(scenario, render_mode=mode)
