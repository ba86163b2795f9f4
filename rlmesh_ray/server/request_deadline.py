"""The deadline of a request or call, in the event loop: waiting until then, and what follows.

A busy environment cannot be asked to stop. A worker that has missed a deadline finishes in vain,
or is killed after a grace time.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from rlmesh_ray.envs.commands import Outcome
from rlmesh_ray.envs.worker_process import WorkerProcess
from rlmesh_ray.server.event_loop import in_thread
from rlmesh_ray.transport.exactly_once import EndpointSide


@dataclass(frozen=True, slots=True)
class Deadline:
    """The time by which a request or call must be answered."""

    timeout_ms: int
    at_s: float | None
    """In the loop's time; None: never."""

    @classmethod
    def after(cls, timeout_ms: int, waited_s: float = 0.0) -> Self:
        """Return the time that lies ``timeout_ms`` ahead, less what has passed; 0: never."""
        now_s = asyncio.get_running_loop().time() - waited_s
        return cls(timeout_ms, now_s + timeout_ms / 1000 if timeout_ms > 0 else None)

    @property
    def has_passed(self) -> bool:
        """Whether that time has come."""
        return self.at_s is not None and asyncio.get_running_loop().time() >= self.at_s


async def wait_for_reply(worker: WorkerProcess, deadline_s: float | None) -> bool:
    """Wait until the reply of ``worker`` has arrived, or the worker has ended.

    The rest of the command is sent meanwhile.

    Args:
        worker: Has not ended.
        deadline_s: In the loop's time; None: wait for ever.

    Returns:
        False if the loop's time passed ``deadline_s`` first.
    """
    if worker.has_reply:  # read already: the socket does not become readable for it again
        return True
    loop = asyncio.get_running_loop()
    arrival: asyncio.Future[bool] = loop.create_future()
    descriptor = worker.fileno()

    def advance() -> None:
        if worker.advance():
            _set_result(arrival, True)
        elif is_sending and not worker.is_sending:
            loop.remove_writer(descriptor)

    is_sending = worker.is_sending
    timer = (
        loop.call_at(deadline_s, _set_result, arrival, False) if deadline_s is not None else None
    )
    loop.add_reader(descriptor, advance)
    if is_sending:
        loop.add_writer(descriptor, advance)
    try:
        return await arrival
    finally:
        loop.remove_reader(descriptor)
        if is_sending:
            loop.remove_writer(descriptor)
        if timer is not None:
            timer.cancel()


async def take_reply(worker: WorkerProcess) -> Outcome:
    """Return the reply that has arrived, or the failure of a worker that has ended."""
    if worker.has_reply:
        return worker.receive()
    # The system may take a moment to end a large process.
    return await in_thread(worker.receive)


def _set_result(future: "asyncio.Future[bool]", value: bool) -> None:
    if not future.done():
        future.set_result(value)


class LateCommand:
    """The command that a worker finishes in vain, since its deadline has passed; at most one.

    Args:
        endpoint: Notes that the worker has finished.
        grace_s: How long the worker may go on after a deadline before it is killed.
        warn: Logs a warning about the session.
    """

    def __init__(
        self, endpoint: EndpointSide, grace_s: float, warn: Callable[[str, float], None]
    ) -> None:
        self._endpoint = endpoint
        self._grace_s = grace_s
        self._warn = warn
        self._finishing: asyncio.Task[None] | None = None

    def finish(self, worker: WorkerProcess, observer_grace_s: float = 0.0) -> None:
        """Let ``worker`` finish, and kill it when that takes too long; returns at once.

        Args:
            worker: The process.
            observer_grace_s: How long an observer's picture may take after the late step.
        """
        self._finishing = asyncio.ensure_future(self._finish(worker, observer_grace_s))

    async def wait(self) -> None:
        """Wait until the worker is idle, or gone."""
        while self._finishing is not None and not self._endpoint.is_at_rest:
            await asyncio.shield(self._finishing)

    def cancel(self) -> None:
        """Stop waiting for the worker."""
        if self._finishing is not None:
            self._finishing.cancel()

    async def _finish(self, worker: WorkerProcess, observer_grace_s: float) -> None:
        try:
            if worker.fileno() < 0:  # it has died meanwhile
                return
            loop = asyncio.get_running_loop()
            has_finished = await wait_for_reply(worker, loop.time() + self._grace_s)
            if not has_finished and observer_grace_s and not worker.progress.is_busy:
                has_finished = await wait_for_reply(worker, loop.time() + observer_grace_s)
            if has_finished:
                await take_reply(worker)
            else:
                self._warn("still busy %g s after a deadline: the worker is killed", self._grace_s)
                await in_thread(worker.kill)
        finally:
            self._endpoint.reply_received()
            self._finishing = None
