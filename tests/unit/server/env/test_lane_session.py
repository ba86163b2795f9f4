"""Calls and requests of a session take turns, and only allowed names get a turn."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol.env_session import Failure, FailureKind
from rlmesh_ray.protocol.messages import EnvErrorCode
from rlmesh_ray.server.endpoint.log import logged_as, short_name
from rlmesh_ray.server.env.env_options import checked_names
from rlmesh_ray.server.env.lane_session import Sessions
from rlmesh_ray.wire.lane_calls_v1 import CallFailed, LaneCall
from tests.unit.server.env.slow_session import SlowSession

Scenario = Callable[[SlowSession], Coroutine[Any, Any, None]]


def play(scenario: Scenario) -> list[str]:
    """Return the log of ``scenario``."""

    async def run() -> list[str]:
        session = SlowSession()
        await scenario(session)
        return session.log

    return asyncio.run(run())


async def settle() -> None:
    for _ in range(9):
        await asyncio.sleep(0)


def test_a_call_waits_for_the_requests_before_it_that_have_not_even_arrived() -> None:
    async def scenario(session: SlowSession) -> None:
        session.gate.set()
        calling = asyncio.ensure_future(session.call(LaneCall("f", num_requests=2)))
        await settle()
        for name in (b"reset", b"step"):
            assert await session.answer(name) == name
        assert await calling == (1,)

    log = play(scenario)

    assert log == [
        *("reset begins", "reset ends", "step begins", "step ends", "f begins", "f ends")
    ]


def test_a_request_waits_for_the_call_before_it() -> None:
    async def scenario(session: SlowSession) -> None:
        calling = asyncio.ensure_future(session.call(LaneCall("f")))
        await settle()
        stepping = asyncio.ensure_future(session.answer(b"step"))
        await settle()
        session.gate.set()
        await asyncio.gather(calling, stepping)

    assert play(scenario) == ["f begins", "f ends", "step begins", "step ends"]


def test_a_call_that_waits_too_long_is_not_done() -> None:
    async def scenario(session: SlowSession) -> None:
        outcome = await session.call(LaneCall("f", num_requests=1, timeout_ms=1))
        assert isinstance(outcome, CallFailed)
        assert outcome.code is EnvErrorCode.BUSY
        assert "not called: still at the requests before it after 1 ms" in outcome.message
        session.gate.set()
        assert await session.call(LaneCall("g")) == (1,)

    assert play(scenario) == ["g begins", "g ends"]


async def hung_up(calling: "asyncio.Task[Any]") -> None:
    await settle()
    calling.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await calling


def test_a_caller_that_hangs_up_while_it_waits_is_forgotten() -> None:
    async def scenario(session: SlowSession) -> None:
        session.gate.set()
        await hung_up(asyncio.ensure_future(session.call(LaneCall("f", num_requests=1))))
        await session.answer(b"step")
        await settle()

    assert play(scenario) == ["step begins", "step ends"]


def test_a_call_that_has_begun_ends_although_its_caller_hangs_up() -> None:
    async def scenario(session: SlowSession) -> None:
        await hung_up(asyncio.ensure_future(session.call(LaneCall("f"))))
        stepping = asyncio.ensure_future(session.answer(b"step"))
        await settle()
        session.gate.set()
        await stepping

    assert play(scenario) == ["f begins", "f ends", "step begins", "step ends"]


def test_the_end_of_a_session_ends_its_calls() -> None:
    async def scenario(session: SlowSession) -> None:
        running = asyncio.ensure_future(session.call(LaneCall("f")))
        waiting = asyncio.ensure_future(session.call(LaneCall("g")))
        await settle()
        session.end()
        assert await running is None
        assert await waiting is None
        assert await session.call(LaneCall("h")) is None

    assert play(scenario) == ["f begins"]


def test_what_goes_wrong_has_the_code_that_a_step_would_have() -> None:
    async def scenario(session: SlowSession) -> None:
        session.gate.set()
        session.outcome = Failure(FailureKind.RAISED, "ValueError", "Traceback")
        expected = CallFailed(EnvErrorCode.INTERNAL, "ValueError", "Traceback")
        assert await session.call(LaneCall("f")) == expected

    play(scenario)


def test_names_of_attributes_may_be_allowed() -> None:
    assert checked_names(["set_task", "level", "set_task"]) == ("set_task", "level")
    assert checked_names(()) == ()


@pytest.mark.parametrize(
    "name",
    ["_private", "__class__", "", "a.b", "f()", "two words", "a,b", "class", "x" * 201, b"f", 3],
)
def test_what_is_no_public_attribute_is_refused(name: Any) -> None:
    words = "not a public attribute" if isinstance(name, str) else "must be a list of names"
    with pytest.raises(ConfigurationError, match=words):
        checked_names(["set_task", name])


@pytest.mark.parametrize("name", ["reset", "step", "close"])
def test_what_belongs_to_the_session_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="belongs to the session"):
        checked_names([name])


def test_a_single_text_in_place_of_names_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"several names: \('set_task',\)"):
        checked_names("set_task")


# --- the open sessions -----------------------------------------------------------------------


def opened(sessions: Sessions, session_id: str, name: str) -> SlowSession:
    session = SlowSession()
    session.session_id = session_id
    with logged_as("endpoint", name):
        sessions.add(session)
    return session


def test_a_session_is_found_by_its_id_until_it_ends() -> None:
    async def run() -> None:
        sessions = Sessions()
        own, other = (opened(sessions, each, "same name") for each in ("own", "other"))

        assert sessions.by_id == {"own": own, "other": other}
        assert sessions.by_name["same name"] is own
        sessions.end(own)
        sessions.end(own)
        assert sessions.by_id == {"other": other}
        assert list(sessions.by_name.values()) == [other]

    asyncio.run(run())


def test_a_second_stream_with_the_same_id_is_listed_but_not_found_by_it() -> None:
    async def run() -> None:
        sessions = Sessions()
        first, replay = (opened(sessions, "own", short_name("own")) for _ in range(2))

        assert list(sessions.by_name.values()) == [first, replay]
        assert sessions.by_id == {"own": first}
        sessions.end(first)
        assert sessions.by_id == {}

    asyncio.run(run())


def test_a_session_without_an_id_is_listed_but_not_found() -> None:
    async def run() -> None:
        sessions = Sessions()
        released = opened(sessions, "", short_name(""))

        assert list(sessions.by_name.values()) == [released]
        assert sessions.by_id == {}

    asyncio.run(run())
