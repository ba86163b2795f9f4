import threading
from collections import deque
from collections.abc import Iterator

import pytest

from rlmesh_ray.server.policy_executor import PolicyExecutor
from rlmesh_ray.server.policy_thread import PolicyThread, Work

PATIENCE_S = 20.0


class Plan:
    """Batches that wait, and what has been done in which order."""

    def __init__(self) -> None:
        self.batches: deque[Work] = deque()
        self.done: list[str] = []
        self.thread = PolicyThread(self._next)

    def _next(self) -> Work | None:
        return self.batches.popleft() if self.batches else None

    def note(self, name: str) -> Work:
        return lambda: self.done.append(name)

    def finish(self) -> None:
        """Wait until everything that came before has been done."""
        arrived = threading.Event()
        self.thread.call(arrived.set)
        assert arrived.wait(PATIENCE_S)


@pytest.fixture
def plan() -> Iterator[Plan]:
    made = Plan()
    yield made
    made.thread.end()


def hold(plan: Plan) -> threading.Event:
    """Keep the thread at a call until the event is set."""
    begun, may_go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        may_go_on.wait(PATIENCE_S)

    plan.thread.call(wait)
    assert begun.wait(PATIENCE_S)
    return may_go_on


def test_calls_run_in_the_order_in_which_they_came(plan: Plan) -> None:
    for name in "abc":
        plan.thread.call(plan.note(name))
    plan.finish()

    assert plan.done == ["a", "b", "c"]


def test_calls_and_batches_take_turns(plan: Plan) -> None:
    may_go_on = hold(plan)
    for number in range(3):
        plan.thread.call(plan.note(f"call {number}"))
        plan.batches.append(plan.note(f"batch {number}"))
    plan.thread.wake()
    may_go_on.set()
    plan.finish()

    assert plan.done == ["batch 0", "call 0", "batch 1", "call 1", "batch 2", "call 2"]


def test_calls_that_are_made_together_take_one_turn(plan: Plan) -> None:
    calls = PolicyExecutor(plan.thread)
    may_go_on = hold(plan)
    made = [calls.submit_grouped(plan.note(name)) for name in "abc"]
    made[1].cancel()
    plan.batches += [plan.note("batch 0"), plan.note("batch 1")]
    plan.thread.wake()
    may_go_on.set()
    made[2].result(PATIENCE_S)
    calls.submit_grouped(plan.note("d")).result(PATIENCE_S)
    plan.finish()

    assert plan.done[:3] == ["batch 0", "a", "c"]
    assert sorted(plan.done[3:]) == ["batch 1", "d"]


def test_closed_calls_are_cancelled_also_those_that_were_made_together(plan: Plan) -> None:
    calls = PolicyExecutor(plan.thread)
    may_go_on = hold(plan)
    made = [calls.submit_grouped(plan.note(name)) for name in "ab"]
    calls.close()
    made.append(calls.submit_grouped(plan.note("c")))
    may_go_on.set()
    plan.finish()

    assert all(call.cancelled() for call in made)
    assert plan.done == []


def test_a_ring_is_never_lost(plan: Plan) -> None:
    for _ in range(2000):
        done = threading.Event()
        plan.batches.append(done.set)
        plan.thread.wake()
        assert done.wait(PATIENCE_S)


def test_it_tells_for_how_long_it_has_been_at_its_work(plan: Plan) -> None:
    plan.finish()
    may_go_on = hold(plan)

    before_s = plan.thread.busy_for_s
    while plan.thread.busy_for_s <= before_s:
        pass
    may_go_on.set()
    plan.finish()
    while plan.thread.busy_for_s:  # the last call has only just returned
        pass

    assert before_s > 0


def test_work_is_done_in_the_caller_s_thread_while_it_is_free(plan: Plan) -> None:
    done_by: list[tuple[threading.Thread, bool]] = []

    def work() -> None:
        done_by.append((threading.current_thread(), plan.thread.is_busy))

    plan.finish()
    while plan.thread.busy_for_s:  # the last call has only just returned
        pass

    # It may be having its last look for work before it sleeps.
    while not plan.thread.try_run_inline(work):
        pass

    assert done_by == [(threading.main_thread(), True)]
    assert not plan.thread.is_busy


def test_nobody_else_is_at_work_on_the_policy_meanwhile(plan: Plan) -> None:
    may_go_on = hold(plan)
    assert not plan.thread.try_run_inline(plan.note("a second one"))
    plan.thread.call(plan.note("next"))
    assert not plan.thread.try_run_inline(plan.note("a second one"))
    may_go_on.set()
    plan.finish()

    assert plan.done == ["next"]


def test_calls_wait_while_work_is_done_elsewhere(plan: Plan) -> None:
    def call_meanwhile() -> None:
        plan.thread.call(plan.note("call"))
        plan.done.append("here")

    while not plan.thread.try_run_inline(call_meanwhile):
        pass
    plan.finish()

    assert plan.done == ["here", "call"]


def test_what_waits_when_it_ends_is_not_done() -> None:
    others = set(threading.enumerate())
    plan = Plan()
    threads = set(threading.enumerate()) - others
    may_go_on = hold(plan)
    plan.thread.call(plan.note("too late"))
    plan.thread.end()
    may_go_on.set()
    for thread in threads:
        thread.join(PATIENCE_S)

    assert not any(thread.is_alive() for thread in threads)
    assert plan.done == []


class Unspeakable(BaseException):
    """Cannot even be printed."""

    def __str__(self) -> str:
        raise Unspeakable


def test_work_that_raises_does_not_end_the_thread(
    plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise Unspeakable

    plan.thread.call(fail)
    plan.batches.append(fail)
    plan.thread.wake()
    plan.thread.call(plan.note("next"))
    plan.finish()
    while plan.thread.busy_for_s:  # the last call has only just returned
        pass

    assert plan.done == ["next"]
    assert caplog.text.count("the work of a policy has failed") == 2
