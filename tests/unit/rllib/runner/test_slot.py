import threading
from typing import Any

import numpy as np
import pytest

from rlmesh_ray.errors import (
    AccessDeniedError,
    ContractMismatchError,
    EndpointLostError,
    EndpointUnreachableError,
    RemoteEnvError,
    RlmeshError,
)
from rlmesh_ray.rllib.runner.autoreset_emulation import SessionBatch
from rlmesh_ray.rllib.runner.completion_queue import CompletionQueue
from rlmesh_ray.rllib.runner.slot import RetryPolicy, Slot, SlotPhase, SlotResult

AWAY = EndpointUnreachableError("nothing answers there", "host:1")
RAISED = RemoteEnvError("INTERNAL", "ValueError: worn out", is_recoverable=False)
BATCH = SessionBatch(np.zeros(1), np.zeros(1), np.zeros(1, np.bool_), np.zeros(1, np.bool_), [{}])


class Group:
    """Records calls, and raises ``error`` if it is set."""

    num_envs = 1

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.error: Exception | None = None

    def reset(self, seeds: Any = (), options: Any = None) -> SessionBatch:
        self.asked.append("reset")
        return BATCH

    def send(self, actions: Any) -> None:
        if self.error is not None:
            raise self.error
        self.asked.append("send")

    def receive(self) -> SessionBatch:
        return BATCH

    def wakeup(self) -> None:
        return None

    def call(self, name: str, arguments: Any) -> tuple[Any, ...]:
        self.asked.append((name, *arguments))
        return (None,)

    def close(self) -> None:
        self.asked.append("close")


def slot_of(group: Any, completions: CompletionQueue[SlotResult]) -> Slot:
    slot = Slot(range(1), lambda: group, completions)
    slot.open()
    return slot


def test_what_was_called_while_a_slot_was_away_is_called_before_its_next_step() -> None:
    group, completions = Group(), CompletionQueue[SlotResult](1)
    slot = slot_of(group, completions)
    slot.reopen(0.0)
    completions.take(None)  # it is open again, but its runner has not processed that yet
    slot.call("set_level", (3,))
    slot.phase = SlotPhase.IDLE
    slot.call("set_wind", (1,))
    group.asked.clear()

    slot.step(None)

    assert group.asked == [("set_level", 3), ("set_wind", 1), "send"]


def test_a_new_session_gets_the_last_value_of_each_attribute_that_was_set() -> None:
    group, completions = Group(), CompletionQueue[SlotResult](1)
    slot = slot_of(group, completions)
    for name, value in (("gravity", 1), ("wind", 2), ("gravity", 3)):
        slot.call("set_wrapper_attr", (name, value))
    group.asked.clear()

    slot.reopen(0.0)
    completions.take(10)

    set_again = [("set_wrapper_attr", "gravity", 3), ("set_wrapper_attr", "wind", 2)]
    assert group.asked == ["close", *set_again, "reset"]
    slot.close()
    completions.close()


@pytest.mark.parametrize(
    "error",
    [
        EndpointLostError("the session broke", "host:1"),
        RemoteEnvError("INTERNAL", "worn out", is_recoverable=False),
    ],
)
def test_a_step_that_cannot_be_sent_arrives_as_a_failure(error: Any) -> None:
    group, completions = Group(), CompletionQueue[SlotResult](1)
    slot = slot_of(group, completions)
    group.error = error

    slot.step(None)

    arrival = completions.take(None)
    assert arrival is not None
    assert (arrival.batch, arrival.error) == (None, error)


def test_an_error_of_the_caller_s_leaves_the_slot_idle() -> None:
    group, completions = Group(), CompletionQueue[SlotResult](1)
    slot = slot_of(group, completions)
    group.error = ValueError("no such action")

    with pytest.raises(ValueError, match="no such action"):
        slot.step(None)

    assert slot.phase is SlotPhase.IDLE


def test_the_only_slot_is_reopened_in_the_background() -> None:
    groups, opened = [Group(), Group()], threading.Event()

    def open_group() -> Any:
        group = groups[len(opened_groups)]
        opened_groups.append(group)
        if group is groups[1]:
            opened.set()
        return group

    opened_groups: list[Group] = []
    completions = CompletionQueue[SlotResult](1)
    slot = Slot(range(1), open_group, completions)
    slot.open()

    slot.reopen(0.0, in_background=True)

    assert opened.wait(10)
    arrival = completions.take(10)
    assert arrival is not None
    assert arrival.work == slot.work
    assert (groups[0].asked, groups[1].asked) == (["close"], ["reset"])
    slot.close()
    completions.close()


def test_a_fault_in_a_slot_s_thread_arrives_instead_of_ending_the_thread() -> None:
    fault, groups = KeyError("a defect"), [Group(), Group()]
    outcomes: list[Any] = [groups[0], fault, groups[1]]

    def open_group() -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    completions = CompletionQueue[SlotResult](2)
    slot = Slot(range(1), open_group, completions)
    slot.open()

    slot.reopen(0.0)
    first = completions.take(10)
    slot.reopen(0.0)
    second = completions.take(10)

    assert first is not None
    assert (first.batch, first.error) == (None, fault)
    assert second is not None
    assert second.batch is BATCH
    slot.close()
    completions.close()


def test_work_that_was_overtaken_is_not_current() -> None:
    group, completions = Group(), CompletionQueue[SlotResult](2)
    slot = slot_of(group, completions)
    slot.step(None)
    slot.reset(())

    first, second = completions.take(10), completions.take(10)
    slot.close()
    completions.close()

    assert first is not None
    assert second is not None
    assert first.work != slot.work
    assert second.work == slot.work


# --- when to try again, and when to give up ---------------------------------------------------


def test_the_first_new_try_comes_at_once_and_later_ones_a_second_apart_at_most() -> None:
    retry = RetryPolicy()

    delays = [retry.failed(AWAY, now_s=100.0) for _ in range(6)]

    assert delays == [0.0, 0.25, 0.5, 1.0, 1.0, 1.0]


def test_an_endpoint_may_stay_away_for_a_while_but_not_for_ever() -> None:
    retry = RetryPolicy(give_up_after_s=60.0)

    assert retry.failed(AWAY, now_s=100.0) is not None
    assert retry.failed(AWAY, now_s=159.0) is not None
    assert retry.failed(AWAY, now_s=161.0) is None


def test_an_absence_is_said_at_first_and_then_after_each_doubling_of_its_seconds() -> None:
    retry = RetryPolicy(give_up_after_s=60.0)
    said = []
    for now_s in range(100, 161):
        retry.failed(AWAY, float(now_s))
        said += [retry.absence_to_report(float(now_s))]

    assert list(filter(None, said)) == [
        (away_s, 60.0 - away_s) for away_s in (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    ]
    retry.succeeded()
    retry.failed(AWAY, 200.0)
    assert retry.absence_to_report(200.0) == (0.0, 60.0)


def test_an_endpoint_may_stay_away_without_limit_while_other_slots_sample() -> None:
    retry = RetryPolicy(give_up_after_s=60.0)
    retry.failed(AWAY, now_s=0.0)

    assert retry.failed(AWAY, now_s=10_000.0, others_work=True) is not None
    assert retry.failed(AWAY, now_s=10_000.0) is None


def test_success_restores_all_patience() -> None:
    retry = RetryPolicy(give_up_after_s=60.0)
    retry.failed(AWAY, now_s=100.0)
    retry.succeeded()

    assert retry.failed(AWAY, now_s=500.0) == 0.0
    assert retry.num_failures == 1


def test_an_environment_that_raises_is_tried_ten_times_however_long_that_takes() -> None:
    retry = RetryPolicy(give_up_after_s=1.0)

    delays = [retry.failed(RAISED, now_s=float(100 * number)) for number in range(11)]

    assert None not in delays[:10]
    assert delays[10] is None


def test_steps_that_succeed_give_an_environment_that_raises_no_more_tries() -> None:
    retry = RetryPolicy()

    delays = []
    for number in range(11):
        retry.succeeded()
        delays.append(retry.failed(RAISED, now_s=float(number)))

    assert delays[:4] == [0.0, 0.1, 0.2, 0.4]
    assert delays[10] is None
    assert retry.num_raised == 11


def test_an_episode_that_is_finished_gives_an_environment_all_tries_again() -> None:
    retry = RetryPolicy()
    for _ in range(10):
        retry.failed(RAISED, now_s=0.0)
    retry.finished_episode()

    assert retry.failed(RAISED, now_s=0.0) == 0.0


def test_losses_and_errors_in_turns_do_not_go_on_for_ever() -> None:
    retry = RetryPolicy(give_up_after_s=1000.0)
    errors = [RAISED, EndpointLostError("the session broke", "host:1")] * 10

    delays = [retry.failed(error, now_s=0.0) for error in errors]

    assert None not in delays
    assert retry.failed(RAISED, now_s=0.0) is None


def test_a_long_absence_takes_no_try_from_an_environment_that_raises() -> None:
    retry = RetryPolicy(give_up_after_s=1000.0)
    for second in range(30):
        retry.failed(AWAY, now_s=float(second))

    assert retry.failed(RAISED, now_s=30.0) is not None


@pytest.mark.parametrize(
    "error",
    [AccessDeniedError("no such token", "host:1"), ContractMismatchError("another width")],
)
def test_what_would_end_the_same_is_not_tried_again(error: RlmeshError) -> None:
    assert RetryPolicy().failed(error, now_s=0.0) is None
