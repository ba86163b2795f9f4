"""The deadlines of a session's worker, and its direct connection, without a process."""

import asyncio
import logging
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlmesh_ray.envs.commands import (
    Command,
    DirectReply,
    OpenDirectCommand,
    Outcome,
    RenderCommand,
    RenderReply,
    ResetCommand,
    SetEpisodesCommand,
)
from rlmesh_ray.envs.worker_process import DirectHandle
from rlmesh_ray.protocol.env_session import Failure, FailureKind
from rlmesh_ray.server.env import session_worker
from rlmesh_ray.server.env.session_worker import Deadline, SessionWorker
from rlmesh_ray.server.observe.counters import EnvCounters, FailureLog
from rlmesh_ray.transport.exactly_once import SessionProgress
from tests.unit.server.endpoint.jumping_loop import JumpingLoop

ENOUGH_S = 30.0


class BusyWorker:
    """A worker at a step, which replies only when the test lets it."""

    has_message = is_sending = False
    contract = SimpleNamespace(num_envs=1)

    def __init__(self) -> None:
        self.progress = SessionProgress.local(1)
        self.connection, self._theirs = socket.socketpair()
        self.channel = self
        self.was_killed = False

    def submit(self, command: object, number: int = 0) -> None:
        """Take it, and do nothing."""

    def advance(self) -> bool:
        return self.has_message

    def reply(self) -> None:
        self.has_message = True
        self._theirs.send(b"x")

    def receive(self) -> RenderReply:
        return RenderReply(b"png")

    def kill(self) -> None:
        self.was_killed = True
        self.connection.close()
        self._theirs.close()


def pool() -> Any:
    return SimpleNamespace(
        counts=EnvCounters(), num_sessions=1, failures=FailureLog(), step_grace_s=0.0
    )


def session_of(process: Any) -> SessionWorker:
    session = SessionWorker(pool(), 1)
    session.process = process
    return session


def asked_aside(*, begins_later: bool, replies: bool) -> tuple[Any, BusyWorker]:
    """Ask for a picture without a deadline during a step of 20 ms; return the answer."""

    async def run() -> tuple[Any, BusyWorker]:
        process = BusyWorker()
        session = session_of(process)

        def begin() -> None:
            process.progress.begin(1, 20)
            if replies:
                process.progress.end()
                process.reply()

        if begins_later:  # the endpoint has looked by then
            asyncio.get_running_loop().call_soon(begin)
        else:
            begin()
        answer = await session.call_after_step(RenderCommand(), 0)
        await session.make_idle(_never())
        return answer, process

    answer, process = asyncio.run(run())
    if not process.was_killed:
        process.kill()
    return answer, process


class ClockedProgress(SessionProgress):
    """Its request in progress has begun a moment after the clock of a ``JumpingLoop``."""

    loop: JumpingLoop

    @property
    def elapsed_ns(self) -> int:
        return int((self.loop.time() - 100.01) * 1e9)


def reset_of_eight_lanes() -> Outcome:
    """Have the lanes reset, one each 5 s, with a deadline after 30 s; return the answer."""
    process, loop = BusyWorker(), JumpingLoop()
    process.progress = progress = ClockedProgress.local(1)
    ClockedProgress.loop = loop

    async def run() -> Outcome:
        session = session_of(process)
        loop.call_soon(progress.begin, 1, 30_000)
        loop.call_soon(progress.note_resets, 0, 8)
        for number in range(1, 9):
            loop.call_later(5.0 * number - 0.5, progress.note_resets, number, 8)
        answer = await session.request(ResetCommand(), Deadline(30_000), 1)
        await session.make_idle(_never())
        return answer

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(run())


def test_resets_that_take_long_are_logged_less_and_less_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, session_worker.__name__)

    reset_of_eight_lanes()

    assert [each.message for each in caplog.records if each.levelno == logging.INFO] == [
        "resetting: 0 of 8 lanes after 3 s",
        "resetting: 1 of 8 lanes after 6 s",
        "resetting: 2 of 8 lanes after 12 s",
        "resetting: 4 of 8 lanes after 24 s",
    ]


def test_a_reset_that_is_late_says_how_many_lanes_had_been_reset() -> None:
    answer = reset_of_eight_lanes()

    message = "no result within 30000 ms: the reset of 8 lanes, of which 6 had been reset"
    assert answer == Failure(FailureKind.TIMEOUT, message)


def _never() -> Any:
    return SimpleNamespace(at_s=None, timeout_ms=0)


@pytest.mark.parametrize("begins_later", [False, True], ids=["before", "at the same time"])
def test_a_step_keeps_its_deadline_while_a_command_waits_behind_it(begins_later: bool) -> None:
    answer, process = asked_aside(begins_later=begins_later, replies=False)

    assert answer == Failure(FailureKind.TIMEOUT, "no result within 20 ms")
    assert process.was_killed


@pytest.mark.parametrize("begins_later", [False, True], ids=["before", "at the same time"])
def test_a_command_behind_a_step_gets_its_own_answer(begins_later: bool) -> None:
    answer, _ = asked_aside(begins_later=begins_later, replies=True)

    assert answer == RenderReply(b"png")


# --- the direct connection -----------------------------------------------------------------


class Channel:
    """The channel of a process that has ended, or that reads a command in so many pieces."""

    def __init__(self, num_pieces: int) -> None:
        self.num_pieces = num_pieces
        descriptor = 0 if num_pieces else -1
        self.connection = SimpleNamespace(fileno=lambda: descriptor)

    @property
    def is_sending(self) -> bool:
        return self.num_pieces > 0

    def advance(self) -> None:
        self.num_pieces -= 1


class Lent(SessionWorker):
    """A worker that opens a direct connection with this reply; its commands are noted."""

    def __init__(self, reply: Outcome, num_pieces: int = 0) -> None:
        super().__init__(pool(), 1)
        self.reply = reply
        self.asked: list[tuple[Command, int]] = []
        self.sent: list[Command] = []
        self.logged: list[str] = []
        self.looks: asyncio.Queue[None] = asyncio.Queue()
        """An item for each look at the direct connection that is planned."""
        self.has_ended = asyncio.Event()
        process: Any = SimpleNamespace(
            open_direct_tcp=lambda connection: DirectHandle((), connection),
            channel=Channel(num_pieces),
            submit=self.sent.append,
            contract=SimpleNamespace(num_envs=1),
            is_alive=True,
        )
        self.process = self.fake = process

    async def call_after_step(self, command: Command, timeout_ms: int) -> Outcome:
        self.asked.append((command, timeout_ms))
        return self.reply

    def warn(self, message: str, *values: object) -> None:
        self.logged.append(message % values)

    def _watch_soon(self, *args: Any) -> None:
        super()._watch_soon(*args)
        self.looks.put_nowait(None)

    def disconnect(self) -> None:
        super().disconnect()
        self.has_ended.set()


def lent(reply: Outcome) -> tuple[Lent, bytes]:
    """Open a TCP connection to a worker with this reply; return it, and what its client reads."""
    ours, theirs = socket.socketpair()
    worker = Lent(reply)

    async def open() -> None:
        assert await worker.open_direct(45_000, ours, tag_arrays=True) is None

    asyncio.run(open())
    with theirs:
        return worker, theirs.recv(1)


def test_a_worker_has_as_long_to_open_a_direct_connection_as_for_a_step() -> None:
    worker, received = lent(Failure(FailureKind.CRASHED, ""))

    assert worker.asked == [(OpenDirectCommand(tag_arrays=True, num_descriptors=1), 45_000)]
    assert received == b""


@pytest.mark.parametrize(
    ("reply", "logged"),
    [
        (
            Failure(FailureKind.BAD_REQUEST, "no room"),
            ["no direct connection for a session: no room"],
        ),
        (Failure(FailureKind.RAISED, "logged already"), []),
    ],
)
def test_the_log_has_the_reason_once(reply: Outcome, logged: list[str]) -> None:
    assert lent(reply)[0].logged == logged


@pytest.mark.parametrize(
    ("num_pieces", "longest_s", "has_left"), [(0, 0.0, True), (3, 60.0, True), (3, 0.0, False)]
)
def test_a_worker_that_does_not_read_loses_its_direct_connection(
    num_pieces: int, longest_s: float, has_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_worker, "_LONGEST_SENDING_S", longest_s)
    ours, theirs = socket.socketpair()
    worker = Lent(DirectReply(is_open=True), num_pieces)

    async def set_episodes() -> None:
        direct = await worker.open_direct(1000, ours, tag_arrays=True)
        assert direct is not None
        await worker.set_episodes((None,))
        await worker.set_episodes((None,))

        assert direct.is_disconnected is not has_left
        assert worker.counts.transport == ("tcp" if has_left else "grpc")
        worker.disconnect()

    asyncio.run(set_episodes())
    theirs.close()

    assert worker.sent == [SetEpisodesCommand((None,))] * (2 if has_left else 1)
    assert len(worker.logged) == (0 if has_left else 1)


def watched(timeout_ms: int, scenario: Callable[[Lent, DirectHandle], Any]) -> None:
    """Play a scenario with a worker whose direct connection is open; its client only listens."""
    ours, theirs = socket.socketpair()
    worker = Lent(DirectReply(is_open=True))

    async def run() -> None:
        direct = await worker.open_direct(timeout_ms, ours, tag_arrays=True)
        assert direct is not None
        worker.has_ended.clear()
        await asyncio.wait_for(scenario(worker, direct), ENOUGH_S)
        worker.disconnect()

    with theirs:
        asyncio.run(run())


def test_a_direct_step_that_misses_its_deadline_is_overdue_and_ends_the_connection() -> None:
    async def scenario(worker: Lent, direct: DirectHandle) -> None:
        worker.progress.begin(1, 10)
        await worker.has_ended.wait()
        assert direct.is_disconnected
        assert worker.endpoint.is_overdue(1)
        assert worker.overdue == Failure(FailureKind.TIMEOUT, "no result within 10 ms")
        assert worker.progress.remaining_s <= 0.0

    watched(10, scenario)


def test_an_overdue_direct_step_is_left_to_a_request_that_waits_for_the_worker() -> None:
    async def scenario(worker: Lent, direct: DirectHandle) -> None:
        worker.endpoint.command_sent()
        worker.progress.begin(1, 10)
        while not worker.progress.overdue_number:
            await worker.looks.get()
        for _ in range(3):
            await worker.looks.get()
        assert not direct.is_disconnected
        worker.endpoint.reply_received()
        await worker.has_ended.wait()
        assert direct.is_disconnected

    watched(10, scenario)


def test_a_direct_step_without_a_deadline_and_one_that_is_done_are_left_alone() -> None:
    async def scenario(worker: Lent, direct: DirectHandle) -> None:
        for number, timeout_ms, is_done in ((1, 0, False), (2, 1, True)):
            worker.progress.begin(number, timeout_ms)
            if is_done:
                worker.progress.end()
            for _ in range(3):
                await worker.looks.get()
            assert not direct.is_disconnected

    watched(10, scenario)


def test_the_death_of_the_worker_ends_its_direct_connection() -> None:
    async def scenario(worker: Lent, direct: DirectHandle) -> None:
        worker.fake.is_alive = False
        await worker.has_ended.wait()
        assert direct.is_disconnected

    watched(10, scenario)
