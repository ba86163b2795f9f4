"""What is asked between two steps never hides that a step is late."""

import asyncio
import logging
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from rlmesh_ray.envs.commands import (
    RenderCommand,
    RenderReply,
    Reply,
    ResetCommand,
    SetEpisodesCommand,
)
from rlmesh_ray.protocol.failure_effects import Failure, FailureKind
from rlmesh_ray.server import worker_supervisor
from rlmesh_ray.server.counters import EnvCounters
from rlmesh_ray.server.request_deadline import Deadline
from rlmesh_ray.server.session_log import FailureLog
from rlmesh_ray.server.worker_supervisor import WorkerSupervisor
from rlmesh_ray.transport.session_progress import SessionProgress
from tests.unit.server.jumping_loop import JumpingLoop


class BusyWorker:
    """A worker at a step, which replies only when the test lets it."""

    has_reply = False
    contract = SimpleNamespace(num_envs=1)

    def __init__(self, num_pieces: int = 0) -> None:
        self.num_pieces = num_pieces
        """Of the command, that have not left; one does each time that it is asked to go on."""
        self.progress = SessionProgress.local(1)
        self._ours, self._theirs = socket.socketpair()
        self.was_killed = False

    def fileno(self) -> int:
        return self._ours.fileno()

    def submit(self, command: object, number: int = 0) -> None:
        """Take it, and do nothing."""

    @property
    def is_sending(self) -> bool:
        return self.num_pieces > 0

    def advance(self) -> bool:
        self.num_pieces = max(0, self.num_pieces - 1)
        return self.has_reply

    def reply(self) -> None:
        self.has_reply = True
        self._theirs.send(b"x")

    def receive(self) -> RenderReply:
        return RenderReply(b"png")

    def kill(self) -> None:
        self.was_killed = True
        self._ours.close()
        self._theirs.close()


def session_of(process: Any) -> WorkerSupervisor:
    pool: Any = SimpleNamespace(counts=EnvCounters(), num_sessions=1, failures=FailureLog())
    session = WorkerSupervisor(pool, 0.0, 1)
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


def reset_of_eight_lanes() -> Reply | Failure:
    """Have the lanes reset, one each 5 s, with a deadline after 30 s; return the answer."""
    process, loop = BusyWorker(), JumpingLoop()
    process.progress = progress = ClockedProgress.local(1)
    ClockedProgress.loop = loop

    async def run() -> Reply | Failure:
        session = session_of(process)
        session.counting.progress = progress
        progress.begin(1, 30_000)
        progress.note_resets(0, 8)
        for number in range(1, 9):
            loop.call_later(5.0 * number - 0.5, progress.note_resets, number, 8)
        answer = await session.call(ResetCommand(), Deadline.after(30_000), 1)
        await session.make_idle(_never())
        return answer

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(run())


def test_resets_that_take_long_are_logged_less_and_less_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, worker_supervisor.__name__)

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


@pytest.mark.parametrize(
    ("num_pieces", "longest_s", "has_left"), [(0, 0.0, True), (3, 60.0, True), (3, 0.0, False)]
)
def test_sending_to_a_worker_that_does_not_read_ends_in_time(
    num_pieces: int, longest_s: float, has_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_supervisor, "_LONGEST_SENDING_S", longest_s)
    process = BusyWorker(num_pieces)

    async def send() -> bool:
        return await session_of(process).send(SetEpisodesCommand(()))

    assert asyncio.run(send()) is has_left
    assert process.is_sending is not has_left
    process.kill()
