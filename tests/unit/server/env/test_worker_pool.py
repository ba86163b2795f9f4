"""What a pool starts and ends, in every order of events; its threads run when the test says so."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlmesh_ray.errors import EnvStartError
from rlmesh_ray.server.env import worker_pool
from rlmesh_ray.server.env.worker_pool import WorkerPool
from rlmesh_ray.spaces.validation import ValidationMode

CONTRACT = SimpleNamespace(
    observation_space=0, action_space=0, num_envs=1, autoreset_mode=0, metadata={}
)


class Host:
    """A process, and the workers in it."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.is_killed = False


class Worker:
    """A worker in a process, or a place for one."""

    contract = CONTRACT
    steps_subsets = True
    is_alive = True
    is_stuck = False

    def __init__(self, host: Host) -> None:
        self.host = host
        host.workers.append(self)

    @property
    def is_over(self) -> bool:
        return self.host.is_killed or not self.host.workers

    def join(self, most_workers: int) -> "Worker | None":
        return Worker(self.host) if len(self.host.workers) < most_workers else None

    def end(self, grace_s: float, *, spares_others: bool = False) -> None:
        """End the worker; all of its process, if the worker does not end by itself."""
        if self in self.host.workers:
            self.host.workers.remove(self)
        # A worker that waits for its first message does not end in time.
        self.host.is_killed = self.host.is_killed or not (spares_others and self.host.workers)

    def close(self, timeout_s: float) -> None:
        self.end(timeout_s, spares_others=True)

    def kill(self, *, spares_others: bool = False) -> None:
        self.end(0.0, spares_others=spares_others)

    def has_children(self) -> bool:
        return False

    def shares_process(self, other: "Worker") -> bool:
        return self.host is other.host


class Threads:
    """What was to run in threads, and has not run."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, Callable[[], None]]] = []
        self.before_next: Callable[[Callable[..., Any]], object] = lambda _: None
        """Called with each function that is to run in a thread."""

    def submit(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> "asyncio.Future[Any]":
        self.before_next(function)
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def run() -> None:
            try:
                outcome.set_result(function(*args, **kwargs))
            except EnvStartError as error:
                outcome.set_exception(error)

        self.waiting.append((function.__name__, run))
        return outcome

    async def run(self, *names: str) -> None:
        """Run what waits under these names, in their order, and let the loop see the outcomes."""
        for name in names:
            index = next(i for i, (each, _) in enumerate(self.waiting) if each == name)
            self.waiting.pop(index)[1]()
            await settled()

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.waiting]


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture(name="threads")
def _threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    threads = Threads()

    def start(_source: object, *, process: Worker | None = None, **_: object) -> Worker:
        return process or Worker(Host())

    handle = SimpleNamespace(start=start, new=lambda: Worker(Host()))
    for name, replaced in {"WorkerProcess": handle, "in_thread": threads.submit}.items():
        monkeypatch.setattr(worker_pool, name, replaced)
    return threads


def started(sessions_per_worker: int = 1, max_sessions: int = 9) -> WorkerPool:
    source: Any = SimpleNamespace(observer=None, can_recreate=True, description="env")
    pool = WorkerPool(source, ValidationMode.WARN, max_sessions, sessions_per_worker)
    pool.start()
    return pool


async def taken(pool: WorkerPool, threads: Threads, count: int) -> list[Any]:
    """Return the workers of so many new sessions."""
    workers: list[Any] = []
    for _ in range(count):
        await pool.reserve()
        taking = asyncio.ensure_future(pool.take())
        await settled()
        await threads.run(*threads.names)
        workers.append(await taking)
    return workers


def test_two_sessions_that_end_together_start_one_spare(threads: Threads) -> None:
    async def run() -> None:
        pool = started()
        first, second = await taken(pool, threads, 2)

        pool.release(first, is_idle=True)
        pool.release(second, is_idle=True)
        await settled()
        await threads.run("join", "join", "close", "close", "has_children", "has_children")

        assert threads.names == ["_start", "end"]
        await threads.run("_start", "end")
        assert [first.host.is_killed, second.host.is_killed] == [False, True]
        spare: Any = await pool.take()
        assert spare.host is first.host

    asyncio.run(run())


def test_a_session_that_comes_while_another_one_ends_gets_its_process(threads: Threads) -> None:
    async def run() -> None:
        pool = started(max_sessions=1)
        (worker,) = await taken(pool, threads, 1)
        pool.release(worker, is_idle=True)
        await settled()
        await threads.run("join", "close")
        waiting = asyncio.ensure_future(_reserved(pool))
        await settled()
        assert threads.names == ["has_children"]  # no other process starts
        await threads.run("has_children", "_start")

        taken_over: Any = await waiting
        assert taken_over.host is worker.host
        assert threads.names == []

    asyncio.run(run())


async def _reserved(pool: WorkerPool) -> Any:
    await pool.reserve()
    return await pool.take()


def test_a_place_that_is_not_needed_leaves_the_process_to_other_sessions(threads: Threads) -> None:
    async def run() -> None:
        pool = started(sessions_per_worker=2)
        neighbour, first, second = await taken(pool, threads, 3)
        assert neighbour.host is first.host is not second.host

        pool.release(second, is_idle=True)
        pool.release(first, is_idle=True)
        await settled()
        await threads.run("join", "join", "close", "close", "_start", "end")

        assert threads.names == []
        assert neighbour.host.workers == [neighbour]
        assert not neighbour.host.is_killed

    asyncio.run(run())


def test_a_spare_does_not_start_behind_an_environment_that_does_not_close(
    threads: Threads,
) -> None:
    async def run() -> None:
        pool = started()
        (worker,) = await taken(pool, threads, 1)
        pool.release(worker, is_idle=True)
        await settled()
        await threads.run("join")
        worker.host.workers[-1].is_stuck = True
        await threads.run("close", "end", "_start")

        assert worker.host.is_killed
        spare: Any = await pool.take()
        assert spare.host is not worker.host

    asyncio.run(run())


def test_a_session_does_not_join_a_process_in_which_an_environment_closes(
    threads: Threads,
) -> None:
    async def run() -> None:
        pool = started(sessions_per_worker=2)
        (closing,) = await taken(pool, threads, 1)
        pool.release(closing, is_idle=True)
        await settled()
        await threads.run("join")
        closing.host.workers.remove(closing)  # as ``close`` does, before it waits

        await pool.reserve()
        taking = asyncio.ensure_future(pool.take())
        await settled()
        await threads.run("_start")

        worker: Any = await taking
        assert worker.host is not closing.host

    asyncio.run(run())


def test_a_pool_closes_while_a_worker_starts(threads: Threads) -> None:
    async def run() -> None:
        pool = started()
        (running,) = await taken(pool, threads, 1)
        taking = []
        for _ in range(2):
            await pool.reserve()
            taking.append(asyncio.ensure_future(pool.take()))
        await settled()
        (_, start), (_, start_later) = threads.waiting
        threads.waiting.clear()
        later = [start_later]
        start()  # in its thread; the loop does not know yet

        def start_one_more(function: Callable[..., Any]) -> None:
            if function != running.kill and later:
                later.pop()()  # in another thread

        threads.before_next = start_one_more
        closing = asyncio.ensure_future(pool.close())
        await settled()
        await threads.run(*threads.names)
        await closing
        await threads.run(*threads.names)

        ends = await asyncio.gather(*taking, return_exceptions=True)
        assert [str(end) for end in ends] == ["the endpoint is closing"] * 2

    asyncio.run(run())
