"""How an endpoint lends a road, without a worker."""

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from rlmesh_ray.envs.commands import (
    AttachCommand,
    AttachRefused,
    AttachReply,
    Command,
    Reply,
    TrackCommand,
)
from rlmesh_ray.protocol.env_rules import State
from rlmesh_ray.protocol.outcomes import Failure, FailureKind
from rlmesh_ray.server.direct_road import DirectRoad
from rlmesh_ray.server.env_exchange import EnvExchange
from rlmesh_ray.transport.lent_road import LentRoad
from rlmesh_ray.transport.progress import Progress


def lent(reply: Reply | Failure) -> tuple[list[tuple[Command, int]], list[str], bytes]:
    """Lend a road over TCP to a worker that replies so; return questions, log and client's end."""
    ours, theirs = socket.socketpair()
    asked: list[tuple[Command, int]] = []
    logged: list[str] = []

    async def call_aside(command: Command, timeout_ms: int) -> Reply | Failure:
        asked.append((command, timeout_ms))
        return reply

    worker: Any = SimpleNamespace(
        process=SimpleNamespace(lend_tcp=lambda connection: LentRoad((), connection)),
        progress=object(),
        endpoint=SimpleNamespace(is_at_rest=True),
        call_aside=call_aside,
        warn=lambda message, *values: logged.append(message % values),
    )

    async def lend() -> None:
        assert await DirectRoad(worker).lend(45_000, ours, tag_arrays=True) is None

    asyncio.run(lend())
    with theirs:
        return asked, logged, theirs.recv(1)


def test_a_worker_has_as_long_to_take_a_road_as_a_step_has() -> None:
    asked, _, received = lent(Failure(FailureKind.CRASHED, ""))

    assert asked == [(AttachCommand(tag_arrays=True, num_descriptors=1), 45_000)]
    assert received == b""


@pytest.mark.parametrize(
    ("reply", "logged"),
    [
        (AttachRefused("no room"), ["no direct road for a session: no room"]),
        (Failure(FailureKind.RAISED, "told already"), []),
    ],
)
def test_the_log_says_once_why_there_is_no_road(reply: Reply | Failure, logged: list[str]) -> None:
    assert lent(reply)[1] == logged


@pytest.mark.parametrize("has_left", [True, False])
def test_a_worker_that_does_not_read_which_episodes_run_loses_the_road(has_left: bool) -> None:
    ours, theirs = socket.socketpair()
    told: list[Command] = []
    logged: list[str] = []

    async def call_aside(command: Command, timeout_ms: int) -> Reply:
        return AttachReply()

    async def tell(command: Command) -> bool:
        told.append(command)
        return has_left

    worker: Any = SimpleNamespace(
        process=SimpleNamespace(lend_tcp=lambda connection: LentRoad((), connection)),
        progress=Progress.local(1),
        endpoint=SimpleNamespace(is_at_rest=True),
        counts=SimpleNamespace(transport="grpc"),
        call_aside=call_aside,
        tell=tell,
        warn=logged.append,
    )

    async def track() -> None:
        road = DirectRoad(worker)
        lent = await road.lend(1000, ours, tag_arrays=True)
        assert lent is not None
        await road.track((None,))
        await road.track((None,))

        assert lent.is_cut is not has_left
        assert worker.counts.transport == ("tcp" if has_left else "grpc")
        road.cut()

    asyncio.run(track())
    theirs.close()

    assert told == [TrackCommand((None,))] * (2 if has_left else 1)
    assert len(logged) == (0 if has_left else 1)


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_road_that_is_cut_while_its_worker_is_told_is_not_lent(is_cut: bool) -> None:
    ours, theirs = socket.socketpair()
    road = LentRoad((), ours)

    async def lend_road(*_: object, tag_arrays: bool) -> LentRoad:
        return road

    async def track(_: object) -> None:
        if is_cut:
            road.cut()

    session: Any = SimpleNamespace(state=State.READY, episodes=(None,))
    host: Any = SimpleNamespace(lend_road=lend_road, track=track)
    dialect: Any = SimpleNamespace(frames=None, rules=SimpleNamespace(ends_when_abandoned=False))
    exchange = EnvExchange(session, host, dialect, tag_arrays=True)

    assert asyncio.run(exchange.lend_road(1000, ours)) is (None if is_cut else road)
    road.cut()
    theirs.close()
