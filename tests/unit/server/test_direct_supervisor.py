"""How an endpoint opens a direct connection, without a worker."""

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
from rlmesh_ray.protocol.env_session import SessionState
from rlmesh_ray.protocol.failure_effects import Failure, FailureKind
from rlmesh_ray.server.direct_supervisor import DirectSupervisor
from rlmesh_ray.server.env_session_handler import EnvSessionHandler
from rlmesh_ray.transport.direct_handle import DirectHandle
from rlmesh_ray.transport.session_progress import SessionProgress


def lent(reply: Reply | Failure) -> tuple[list[tuple[Command, int]], list[str], bytes]:
    """Open a TCP connection to a worker with this reply; return commands, log and client's end."""
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
        assert await DirectSupervisor(worker).open(45_000, ours, tag_arrays=True) is None

    asyncio.run(open())
    with theirs:
        return asked, logged, theirs.recv(1)


def test_a_worker_has_as_long_to_open_a_direct_connection_as_for_a_step() -> None:
    asked, _, received = lent(Failure(FailureKind.CRASHED, ""))

    assert asked == [(OpenDirectCommand(tag_arrays=True, num_descriptors=1), 45_000)]
    assert received == b""


@pytest.mark.parametrize(
    ("reply", "logged"),
    [
        (OpenDirectRefused("no room"), ["no direct connection for a session: no room"]),
        (Failure(FailureKind.RAISED, "logged already"), []),
    ],
)
def test_the_log_has_the_reason_once(reply: Reply | Failure, logged: list[str]) -> None:
    assert lent(reply)[1] == logged


@pytest.mark.parametrize("has_left", [True, False])
def test_a_worker_that_does_not_read_loses_its_direct_connection(
    has_left: bool,
) -> None:
    ours, theirs = socket.socketpair()
    sent: list[Command] = []
    logged: list[str] = []

    async def call_after_step(command: Command, timeout_ms: int) -> Reply:
        return OpenDirectReply()

    async def send(command: Command) -> bool:
        sent.append(command)
        return has_left

    worker: Any = SimpleNamespace(
        process=SimpleNamespace(open_direct_tcp=lambda connection: DirectHandle((), connection)),
        progress=SessionProgress.local(1),
        endpoint=SimpleNamespace(is_at_rest=True),
        counts=SimpleNamespace(transport="grpc"),
        call_after_step=call_after_step,
        send=send,
        warn=logged.append,
        report_resets=lambda: None,
    )

    async def set_episodes() -> None:
        direct = DirectSupervisor(worker)
        lent = await direct.open(1000, ours, tag_arrays=True)
        assert lent is not None
        await direct.set_episodes((None,))
        await direct.set_episodes((None,))

        assert lent.is_disconnected is not has_left
        assert worker.counts.transport == ("tcp" if has_left else "grpc")
        direct.disconnect()

    asyncio.run(set_episodes())
    theirs.close()

    assert sent == [SetEpisodesCommand((None,))] * (2 if has_left else 1)
    assert len(logged) == (0 if has_left else 1)


@pytest.mark.parametrize("is_disconnected", [True, False])
def test_a_connection_that_ends_while_it_is_opened_is_not_returned(
    is_disconnected: bool,
) -> None:
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
