import threading
from typing import Any

import numpy as np
import pytest

from rlmesh_ray.errors import EndpointLostError, RemoteEnvError
from rlmesh_ray.rllib.runner.autoreset_emulation import SessionBatch
from rlmesh_ray.rllib.runner.completion_queue import CompletionQueue
from rlmesh_ray.rllib.runner.slot import Slot, SlotPhase, SlotResult

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
    assert slot.is_current(arrival)
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
    group, completions = Group(), CompletionQueue[SlotResult](1)
    slot = slot_of(group, completions)
    slot.step(None)
    slot.reset((), None)

    first, second = completions.take(None), completions.take(None)

    assert first is not None
    assert second is not None
    assert not slot.is_current(first)
    assert slot.is_current(second)
