"""Requests run exactly once, in whatever order things happen; see ``explorer``."""

import random
import sys

import pytest

from tests.unit.transport.explorer import (
    INVALID,
    PARTIAL,
    RESET,
    STEP,
    Doing,
    Faults,
    Order,
    Result,
    ViolatedError,
    World,
    explore,
    wander,
)

SCRIPT = (RESET, STEP, INVALID, PARTIAL, STEP)


@pytest.mark.parametrize(
    "faults",
    [
        Faults(),
        Faults(cuts=1, kills=1),
        Faults(cuts=1, deadlines=1),
        Faults(kills=1, deadlines=1),
        Faults(cuts=1, lost_streams=1),
        pytest.param(Faults(cuts=1, kills=1, deadlines=1, lost_streams=1), marks=pytest.mark.slow),
        pytest.param(Faults(cuts=2, kills=1, deadlines=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_no_order_of_events_breaks_a_promise(faults: Faults) -> None:
    explored = explore(World(SCRIPT, faults))

    sys.stdout.write(
        f"{SCRIPT}, {faults}: {explored.num_states:,} states, {explored.num_moves:,} moves, the "
        f"longest of the shortest ways has {explored.longest_path}\n"
    )
    assert explored.num_states > 40


@pytest.mark.parametrize("seed", range(8))
def test_no_promise_is_broken_on_long_random_paths(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(40):
        script = [RESET, *draw.choices([RESET, STEP, PARTIAL, INVALID], [1, 6, 1, 1], k=12)]
        wander(World(script, Faults(cuts=4, kills=3, deadlines=4)), draw)


class TwoAccounts(World):
    """As it was: the endpoint judges what has begun, and a stale bell ends the road.

    The client took an answer before its bell was rung; at the next wait the bell is stale. It
    closed the road and asked on the stream, where the endpoint had not seen the request begin.
    """

    def wake_up(self) -> None:
        self.is_cut = True
        self.see_cut()

    def decide(self, order: Order) -> None:
        if order.number <= self.numbers.begun:  # the endpoint's verdict
            self.replies += (Result(order.number, (), "its answer got lost"),)
        else:
            self.doing = Doing(order.number, order.kind, is_direct=False, phase=0)

    def take_step(self) -> None:
        (number,), self.steps = self.steps, ()
        self.worker.begin(number)
        self.doing = Doing(number, STEP, is_direct=True)


class AnswersFirst(World):
    """The worker notes that a request is done after it has answered."""

    def execute(self, doing: Doing) -> None:
        super().execute(doing)
        if doing.is_direct:
            assert self.kept is not None
            self.answer_direct(self.kept)

    def answer_direct(self, result: Result) -> None:
        if result.failure or result not in self.answers:
            super().answer_direct(result)


class ForgetsToConfirm(World):
    """The endpoint passes requests on to a worker that is busy with an overdue one."""

    def miss_direct(self) -> None:
        super().miss_direct()
        self.endpoint.confirmed()


class ForgetsRefusals(World):
    """The endpoint does not tell its worker of a request that it refuses itself."""

    def order(self, order: Order) -> None:
        if order.kind != "pass over":
            super().order(order)


@pytest.mark.parametrize(
    ("broken", "promise"),
    [
        (TwoAccounts, "executed twice"),
        (AnswersFirst, "no late answer arrives"),
        (ForgetsToConfirm, "the worker answers what it was asked"),
        (ForgetsRefusals, "out of order"),
    ],
)
def test_a_broken_rule_is_found(broken: type[World], promise: str) -> None:
    with pytest.raises(ViolatedError, match=promise):
        explore(broken((RESET, STEP, INVALID, STEP, STEP), Faults(cuts=1, deadlines=1)))
