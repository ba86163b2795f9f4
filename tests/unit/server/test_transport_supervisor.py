"""How an endpoint lends a road, without a worker."""

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from rlmesh_ray.envs.commands import (
    Command,
    OpenDirectCommand,
    OpenDirectRefused,
    OpenDirectReply,
    Reply,
    SetEpisodesCommand,
)
from rlmesh_ray.protocol.env_rules import SessionState
from rlmesh_ray.protocol.outcomes import Failure, FailureKind
from rlmesh_ray.server.env_session_handler import EnvSessionHandler
from rlmesh_ray.server.transport_supervisor import TransportSupervisor
from rlmesh_ray.transport.direct_handle import DirectHandle
from rlmesh_ray.transport.session_progress import SessionProgress


def lent(reply: Reply | Failure) -> tuple[list[tuple[Command, int]], list[str], bytes]:
    """Lend a road over TCP to a worker that replies so; return questions, log and client's end."""
    ours, theirs = socket.socketpair()
    asked: list[tuple[Command, int]] = []
    logged: list[str] = []

    async def call_after_step(command: Command, timeout_ms: int) -> Reply | Failure:
        asked.append((command, timeout_ms))
        return reply

    worker: Any = SimpleNamespace(
        process=SimpleNamespace(open_direct_tcp=lambda connection: DirectHandle((), connection)),
        progress=object(),
        endpoint=SimpleNamespace(is_at_rest=True),
        call_after_step=call_after_step,
        warn=lambda message, *values: logged.append(message % values),
    )

    async def open() -> None:
        assert await TransportSupervisor(worker).open(45_000, ours, tag_arrays=True) is None

    asyncio.run(open())
    with theirs:
        return asked, logged, theirs.recv(1)


def test_a_worker_has_as_long_to_take_a_road_as_a_step_has() -> None:
    asked, _, received = lent(Failure(FailureKind.CRASHED, ""))

    assert asked == [(OpenDirectCommand(tag_arrays=True, num_descriptors=1), 45_000)]
    assert received == b""


@pytest.mark.parametrize(
    ("reply", "logged"),
    [
        (OpenDirectRefused("no room"), ["no direct road for a session: no room"]),
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

    async def call_after_step(command: Command, timeout_ms: int) -> Reply:
        return OpenDirectReply()

    async def tell(command: Command) -> bool:
        told.append(command)
        return has_left

    worker: Any = SimpleNamespace(
        process=SimpleNamespace(open_direct_tcp=lambda connection: DirectHandle((), connection)),
        progress=SessionProgress.local(1),
        endpoint=SimpleNamespace(is_at_rest=True),
        counts=SimpleNamespace(transport="grpc"),
        call_after_step=call_after_step,
        tell=tell,
        warn=logged.append,
    )

    async def set_episodes() -> None:
        direct = TransportSupervisor(worker)
        lent = await direct.open(1000, ours, tag_arrays=True)
        assert lent is not None
        await direct.set_episodes((None,))
        await direct.set_episodes((None,))

        assert lent.is_disconnected is not has_left
        assert worker.counts.transport == ("tcp" if has_left else "grpc")
        direct.disconnect()

    asyncio.run(set_episodes())
    theirs.close()

    assert told == [SetEpisodesCommand((None,))] * (2 if has_left else 1)
    assert len(logged) == (0 if has_left else 1)


@pytest.mark.parametrize("is_disconnected", [True, False])
def test_a_road_that_is_cut_while_its_worker_is_told_is_not_lent(is_disconnected: bool) -> None:
    ours, theirs = socket.socketpair()
    direct = DirectHandle((), ours)

    async def open_direct(*_: object, tag_arrays: bool) -> DirectHandle:
        return direct

    async def set_episodes(_: object) -> None:
        if is_disconnected:
            direct.disconnect()

    session: Any = SimpleNamespace(state=SessionState.READY, episodes=(None,))
    host: Any = SimpleNamespace(open_direct=open_direct, set_episodes=set_episodes)
    rules = SimpleNamespace(ends_when_abandoned=False)
    dialect: Any = SimpleNamespace(frames=None, rules=rules, with_timings=None)
    exchange = EnvSessionHandler(session, host, dialect, tag_arrays=True)

    assert asyncio.run(exchange.open_direct(1000, ours)) is (None if is_disconnected else direct)
    direct.disconnect()
    theirs.close()
