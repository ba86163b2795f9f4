import asyncio

import pytest

from rlmesh_ray.transport.direct_deadline_watch import DirectDeadlineWatch
from rlmesh_ray.transport.session_progress import SessionProgress

ENOUGH_S = 30.0


@pytest.fixture
def control() -> SessionProgress:
    return SessionProgress.local(1)


def test_a_step_that_misses_its_deadline_is_reported(control: SessionProgress) -> None:
    async def watch() -> None:
        overdue = asyncio.Event()

        def on_overdue(number: int) -> bool:
            assert number == 1
            overdue.set()
            return True

        watch = DirectDeadlineWatch(control, 10, on_overdue, lambda: True, _no_death)
        control.begin(1, 10)
        await asyncio.wait_for(overdue.wait(), ENOUGH_S)
        assert control.remaining_s is not None
        assert control.remaining_s <= 0.0
        watch.stop()

    asyncio.run(watch())


def test_an_overdue_step_is_reported_again_until_the_connection_ends(
    control: SessionProgress,
) -> None:
    async def watch() -> None:
        reported: asyncio.Queue[None] = asyncio.Queue()

        def on_overdue(number: int) -> bool:
            reported.put_nowait(None)
            return False

        watch = DirectDeadlineWatch(control, 10, on_overdue, lambda: True, _no_death)
        control.begin(1, 10)
        for _ in range(3):
            await asyncio.wait_for(reported.get(), ENOUGH_S)
        watch.stop()

    asyncio.run(watch())


def test_a_step_without_a_deadline_and_one_that_is_done_are_left_alone(
    control: SessionProgress,
) -> None:
    async def watch() -> None:
        checks: asyncio.Queue[None] = asyncio.Queue()

        def is_connected() -> bool:
            checks.put_nowait(None)
            return True

        control.begin(1, 0)
        watch = DirectDeadlineWatch(control, 10, _never, is_connected, _no_death)
        await asyncio.wait_for(checks.get(), ENOUGH_S)
        control.begin(2, 1)
        control.end()
        for _ in range(2):
            await asyncio.wait_for(checks.get(), ENOUGH_S)
        watch.stop()

    asyncio.run(watch())


def test_a_step_that_begins_during_the_check_of_the_one_before_it_is_not_overdue() -> None:
    class Overtaken(SessionProgress):
        @property
        def remaining_s(self) -> float | None:
            self.end()
            self.begin(2, 60_000)
            return -0.001

    progress = Overtaken.local(1)
    progress.begin(1, 1)

    assert progress.overdue_number == 0


def test_the_death_of_the_worker_is_reported_once(control: SessionProgress) -> None:
    async def watch() -> None:
        is_dead = asyncio.Event()
        DirectDeadlineWatch(control, 10, _never, lambda: False, is_dead.set)
        await asyncio.wait_for(is_dead.wait(), ENOUGH_S)

    asyncio.run(watch())


def _no_death() -> None:
    raise AssertionError("the worker lives")


def _never(number: int) -> bool:
    raise AssertionError("nothing is overdue")
