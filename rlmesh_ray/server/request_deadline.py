"""The deadline of a request or call: waiting for a worker's reply until then, in the event loop.

``WorkerSupervisor`` lets a worker that has missed it finish in vain, or kills it.
"""

import asyncio
from dataclasses import dataclass
from typing import Self

from rlmesh_ray.envs.commands import Outcome
from rlmesh_ray.envs.worker_process import WorkerProcess
from rlmesh_ray.server.event_loop import in_thread


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
