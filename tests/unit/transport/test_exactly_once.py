"""Requests run exactly once, in every order of events; see ``session_model``."""

import random
import sys
from typing import Any, NamedTuple

import pytest

from tests.unit.transport import broken_models as broken
from tests.unit.transport.broken_models import with_parts
from tests.unit.transport.endpoint_model import INVALID, PUSHED
from tests.unit.transport.explorer import ViolatedError, explore, wander
from tests.unit.transport.session_model import SHARED_MEMORY, TCP, Faults, World
from tests.unit.transport.worker_model import CALL, PARTIAL, RENDER, RESET, STEP

Script = tuple[str, ...]


class Scenario(NamedTuple):
    """What is explored."""

    scripts: tuple[Script, ...]
    faults: Faults
    medium: str
    is_stubborn: bool = False

    def __str__(self) -> str:
        scripts = " | ".join(", ".join(script) for script in self.scripts)
        stubborn = ", stubborn" if self.is_stubborn else ""
        return f"{scripts} ({self.faults}; {self.medium}{stubborn})"

    def world(self, world_class: type[World] = World) -> World:
        return world_class(
            *self.scripts, faults=self.faults, medium=self.medium, is_stubborn=self.is_stubborn
        )


def once(*script: str, medium: str = SHARED_MEMORY, stubborn: bool = False, **faults: int) -> Any:
    return Scenario((script,), Faults(**faults), medium, stubborn)


def twice(*script: str, medium: str = SHARED_MEMORY, **faults: int) -> Any:
    """Return two sessions, one after the other."""
    return Scenario((script, (RESET, STEP, STEP)), Faults(**faults), medium)


def on_both(make: Any, *script: str, **options: Any) -> list[Any]:
    return [make(*script, medium=medium, **options) for medium in (SHARED_MEMORY, TCP)]


STEPS = (RESET, STEP, INVALID, PARTIAL, STEP)
CALLS = (RESET, STEP, CALL, STEP)
PIPELINED = (RESET, PUSHED, PUSHED, CALL, STEP)

QUICK = [
    *on_both(once, *STEPS),
    once(*STEPS, cuts=1, kills=1),
    *on_both(once, *STEPS, cuts=1, deadlines=1),
    *on_both(once, *STEPS, cuts=1, lost_streams=1),
    # Steps that fail.
    *on_both(once, *STEPS, STEP, raises=1, cuts=1),
    once(RESET, STEP, STEP, INVALID, STEP, stubborn=True, raises=1, deadlines=1),
    # Calls and pictures.
    once(*CALLS, deadlines=1, raises=1),
    once(*CALLS, STEP, stubborn=True, deadlines=1),
    once(*CALLS, cuts=1, kills=1),
    *on_both(once, *PIPELINED, raises=1),
    once(RESET, STEP, RENDER, STEP, raises=1, kills=1),
    once(RESET, STEP, RENDER, STEP, deadlines=1),
    # Direct connections that are opened late, left, lost and closed.
    *on_both(once, RESET, STEP, STEP, STEP, leaves=1, deadlines=1),
    once(RESET, STEP, STEP, drains=1, deadlines=1),
    once(RESET, STEP, STEP, STEP, STEP, cuts=2),
    once(RESET, STEP, STEP, observers=1, deadlines=1),
    # The next session, and a client that lies.
    twice(RESET, STEP, STEP, lost_streams=1),
    *on_both(twice, RESET, STEP, STEP, kills=1),
    *on_both(twice, RESET, STEP, lies=1),
]
LONG = [
    # What the media have in common is explored over shared memory above.
    once(*STEPS, cuts=1, kills=1, medium=TCP),
    once(*CALLS, deadlines=1, raises=1, medium=TCP),
    once(*CALLS, STEP, stubborn=True, deadlines=1, medium=TCP),
    once(RESET, STEP, STEP, drains=1, deadlines=1, medium=TCP),
    once(RESET, STEP, STEP, observers=1, deadlines=1, medium=TCP),
    twice(RESET, STEP, STEP, lost_streams=1, medium=TCP),
    # More faults.
    *on_both(once, *STEPS, cuts=1, kills=1, deadlines=1),
    once(*CALLS, cuts=1, kills=1, deadlines=1),
    *on_both(once, RESET, STEP, STEP, CALL, STEP, stubborn=True, leaves=1, deadlines=2),
    *on_both(once, RESET, PUSHED, CALL, RENDER, STEP, deadlines=2, raises=1),
    once(RESET, STEP, INVALID, INVALID, PARTIAL, STEP, kills=1, deadlines=1, raises=1),
    once(RESET, STEP, STEP, STEP, drains=1, cuts=1, deadlines=1, medium=TCP),
    *on_both(twice, RESET, STEP, STEP, lost_streams=1, deadlines=1),
    *on_both(twice, RESET, STEP, lies=1, kills=1),
    *on_both(twice, RESET, STEP, lies=2),
]


@pytest.mark.parametrize(
    "scenario", [*QUICK, *(pytest.param(one, marks=pytest.mark.nightly) for one in LONG)], ids=str
)
def test_no_order_of_events_breaks_a_promise(scenario: Scenario) -> None:
    explored = explore(scenario.world())

    sys.stdout.write(f"{scenario}: {explored}\n")
    assert explored.num_states > 40


@pytest.mark.parametrize("medium", [SHARED_MEMORY, TCP])
@pytest.mark.parametrize("seed", range(8))
def test_no_promise_is_broken_on_long_random_paths(seed: int, medium: str) -> None:
    draw = random.Random(seed)
    kinds = [RESET, STEP, PUSHED, PARTIAL, INVALID, RENDER, CALL]
    num_moves = 0
    for _ in range(30):
        scripts = [[RESET, *draw.choices(kinds, [1, 6, 2, 1, 1, 1, 2], k=12)] for _ in range(2)]
        faults = Faults(3, 2, 3, 1, 2, 1, 1, 1, draw.choice([0, 0, 6]))
        world = World(*scripts, faults=faults, medium=medium, is_stubborn=draw.random() < 0.5)
        num_moves += wander(world, draw)

    sys.stdout.write(f"seed {seed}, {medium}: {num_moves:,} moves\n")


TWICE = "executed twice"
KEPT = "an honest client keeps its session"
NOTHING_BUT_RESET = "after a failure nothing but a Reset works"
COUNTED = "a failure reports the steps that counted"


@pytest.mark.parametrize(
    ("world_class", "scenario", "promise"),
    [
        (
            with_parts(worker=broken.TwoAccounts, client=broken.HangsUpAtStaleBells),
            once(RESET, STEP, STEP, STEP),
            TWICE,
        ),
        (with_parts(worker=broken.AnswersFirst), once(*STEPS, STEP, deadlines=1), "late answer"),
        (with_parts(worker=broken.ForgetsFailures), once(*STEPS, STEP, raises=1), TWICE),
        (with_parts(worker=broken.DoesItAgain), once(*STEPS, STEP, cuts=1), TWICE),
        (
            with_parts(endpoint=broken.ForgetsToConfirm),
            once(*STEPS, STEP, deadlines=1),
            "the worker answers what was asked",
        ),
        (with_parts(endpoint=broken.ForgetsRefusals), once(RESET, INVALID, STEP), KEPT),
        (
            with_parts(side=broken.ForgetsWhatItTold),
            once(RESET, INVALID, INVALID, PARTIAL),
            KEPT,
        ),
        (with_parts(side=broken.CallsAtOnce), once(*PIPELINED), "call is not refused"),
        (
            with_parts(side=broken.RefusedCallsCount),
            once(RESET, PUSHED, CALL, CALL, STEP, deadlines=1),
            "call is not refused",
        ),
        (
            with_parts(client=broken.CallsBeforeTheAnswer),
            once(RESET, STEP, STEP, CALL, STEP, cuts=1),
            "a client waits",
        ),
        (
            with_parts(client=broken.LooksAtTheBeginning),
            once(RESET, STEP, STEP, STEP, CALL, STEP, cuts=1, medium=TCP),
            KEPT,
        ),
        (
            with_parts(endpoint=broken.TakesBlockBackAtOnce),
            once(*STEPS, STEP, deadlines=1),
            "of another run",
        ),
        (
            with_parts(endpoint=broken.MissesLateReplies),
            once(RESET, STEP, STEP, deadlines=1),
            "the action that was sent",
        ),
        (
            with_parts(endpoint=broken.WatchesNothing),
            once(RESET, STEP, STEP, STEP, kills=1, medium=TCP),
            "a client waits",
        ),
        (
            broken.TakesActionsEarly,
            once(RESET, STEP, STEP, STEP, cuts=1, medium=TCP),
            "the action that was sent",
        ),
        (with_parts(side=broken.ForgetsToStart), once(RESET, STEP, STEP, kills=1), KEPT),
        (with_parts(side=broken.BeginsAnywhere), twice(RESET, STEP, lies=1, kills=1), TWICE),
        (
            with_parts(worker=broken.KeepsTheDirectBuffers),
            once(RESET, STEP, STEP, deadlines=1),
            "of another run",
        ),
        (
            with_parts(side=broken.CountsWhatItRefused),
            once(RESET, STEP, STEP, deadlines=2),
            COUNTED,
        ),
        (
            with_parts(side=broken.SendsSkipsDuringRequests),
            once(RESET, PUSHED, CALL, deadlines=2),
            COUNTED,
        ),
        (
            with_parts(side=broken.CountsOverdueSteps),
            once(*STEPS, deadlines=1),
            COUNTED,
        ),
    ],
)
def test_a_broken_rule_is_found(world_class: type[World], scenario: Any, promise: str) -> None:
    with pytest.raises(ViolatedError, match=promise):
        explore(scenario.world(world_class))
