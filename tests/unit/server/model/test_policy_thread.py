import threading
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from rlmesh_ray.errors import PolicyError
from rlmesh_ray.server.model.policy_thread import PolicyThread, any_policy_runs
from tests.loopback.eventually import eventually

PATIENCE_S = 20.0
Work = Callable[[], object]


class Plan:
    """Batches that wait, and what has been done in which order."""

    def __init__(self) -> None:
        self.batches: deque[Work] = deque()
        self.done: list[str] = []
        before = set(threading.enumerate())
        self.thread = PolicyThread(self.batches, self._run_next)
        self.threads = set(threading.enumerate()) - before

    def _run_next(self) -> bool:
        self.batches.popleft()()
        return True

    def note(self, name: str) -> Work:
        return lambda: self.done.append(name)

    def finish(self) -> None:
        """Wait until everything that came before has been done."""
        arrived = threading.Event()
        self.thread.submit(arrived.set)
        assert arrived.wait(PATIENCE_S)


@pytest.fixture
def plan() -> Iterator[Plan]:
    made = Plan()
    yield made
    made.thread.close()


def hold(plan: Plan) -> threading.Event:
    """Keep the thread at a call until the event is set."""
    begun, may_go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        may_go_on.wait(PATIENCE_S)

    plan.thread.submit(wait)
    assert begun.wait(PATIENCE_S)
    return may_go_on


def test_calls_run_in_the_order_in_which_they_came(plan: Plan) -> None:
    for name in "abc":
        plan.thread.submit(plan.note(name))
    plan.finish()

    assert plan.done == ["a", "b", "c"]


def test_calls_and_batches_take_turns(plan: Plan) -> None:
    may_go_on = hold(plan)
    for number in range(3):
        plan.thread.submit(plan.note(f"call {number}"))
        plan.batches.append(plan.note(f"batch {number}"))
    plan.thread.wake()
    may_go_on.set()
    plan.finish()

    assert plan.done == ["batch 0", "call 0", "batch 1", "call 1", "batch 2", "call 2"]


def test_calls_that_are_made_together_take_one_turn(plan: Plan) -> None:
    may_go_on = hold(plan)
    made = [plan.thread.submit(plan.note(name), is_grouped=True) for name in "abc"]
    made[1].cancel()
    plan.batches += [plan.note("batch 0"), plan.note("batch 1")]
    plan.thread.wake()
    may_go_on.set()
    made[2].result(PATIENCE_S)
    plan.thread.submit(plan.note("d"), is_grouped=True).result(PATIENCE_S)
    plan.finish()

    assert plan.done[:3] == ["batch 0", "a", "c"]
    assert sorted(plan.done[3:]) == ["batch 1", "d"]


def test_a_closed_thread_cancels_its_calls_also_the_grouped_ones_and_ends(plan: Plan) -> None:
    may_go_on = hold(plan)
    made = [plan.thread.submit(plan.note(name), is_grouped=True) for name in "ab"]
    made.append(plan.thread.submit(plan.note("too late")))
    plan.batches.append(plan.note("batch"))
    plan.thread.close()
    made.append(plan.thread.submit(plan.note("c"), is_grouped=True))
    may_go_on.set()
    for thread in plan.threads:
        thread.join(PATIENCE_S)

    assert not any(thread.is_alive() for thread in plan.threads)
    assert all(call.cancelled() for call in made)
    assert plan.done in ([], ["batch"])  # the turn that was under way may have a batch


def test_a_wake_up_is_never_lost(plan: Plan) -> None:
    for _ in range(2000):
        done = threading.Event()
        plan.batches.append(done.set)
        plan.thread.wake()
        assert done.wait(PATIENCE_S)


def test_the_time_since_the_present_work_began_is_known(plan: Plan) -> None:
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


def test_a_free_policy_can_be_reserved_for_the_calling_thread(plan: Plan) -> None:
    plan.finish()
    # The thread may be looking for work once more before it sleeps.
    while not plan.thread.begin_inline():
        pass

    assert plan.thread.is_busy
    plan.thread.end_inline()
    assert not plan.thread.is_busy


def test_a_policy_with_other_work_cannot_be_reserved(plan: Plan) -> None:
    may_go_on = hold(plan)
    assert not plan.thread.begin_inline()
    plan.thread.submit(plan.note("next"))
    assert not plan.thread.begin_inline()
    may_go_on.set()
    plan.finish()

    assert plan.done == ["next"]


def test_calls_wait_while_the_policy_is_reserved(plan: Plan) -> None:
    while not plan.thread.begin_inline():
        pass
    plan.thread.submit(plan.note("call"))
    plan.done.append("here")
    plan.thread.end_inline()
    plan.finish()

    assert plan.done == ["here", "call"]


class Unprintable(BaseException):
    """Cannot even be printed."""

    def __str__(self) -> str:
        raise Unprintable


def test_calls_and_batches_that_raise_do_not_end_the_thread(
    plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise Unprintable

    failed = plan.thread.submit(fail)
    plan.batches.append(fail)
    plan.thread.wake()
    plan.thread.submit(plan.note("next"))
    plan.finish()
    while plan.thread.busy_for_s:  # the last call has only just returned
        pass

    assert plan.done == ["next"]
    assert isinstance(failed.exception(), PolicyError)
    assert caplog.text.count("the work of a policy has failed") == 1


def test_a_policy_that_runs_on_after_the_end_of_its_thread_is_known() -> None:
    thread, has_begun, may_end = PolicyThread(), threading.Event(), threading.Event()

    def hang() -> None:
        has_begun.set()
        may_end.wait(PATIENCE_S)

    hanging = thread.submit(hang)
    assert has_begun.wait(PATIENCE_S)
    thread.close()

    assert any_policy_runs()
    may_end.set()
    hanging.result(PATIENCE_S)
    assert eventually(lambda: not thread.is_busy)
