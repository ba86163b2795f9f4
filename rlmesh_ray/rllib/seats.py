"""Where the sessions of one runner are to be opened, and which ones are asked to go elsewhere.

The directories say both. They are asked without being waited for, a few times a minute at the
most, and whoever only knows fixed addresses is not asked at all.
"""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from rlmesh_ray.actors.calls import outcomes
from rlmesh_ray.actors.seating import Seat
from rlmesh_ray.errors import EndpointError
from rlmesh_ray.rllib.plan import Directory, FixedAddresses, RolloutPlan

_ASK_EVERY_S = 2.0
_FORGET_AFTER_S = 30.0
"""So long an answer may take; then it is asked for again."""

Look = Callable[[Any], Collection[str] | None]
"""Returns the answer to a survey; None: it is not there yet."""


def answer_if_there(survey: Any) -> Collection[str] | None:
    """Return the answer to a survey without waiting; None: it is not there yet.

    Where nobody is left who could answer, nobody is asked to move.
    """
    ready, _ = ray.wait([survey], timeout=0)
    if not ready:
        return None
    (answer,) = outcomes(ready)
    return () if isinstance(answer, Exception) else tuple(answer)


@dataclass(frozen=True, slots=True)
class _Question:
    survey: Any
    seats: dict[int, Seat]
    """Who was where when it was asked; whoever has another seat by now has moved already."""


class Seats:
    """The seats of a runner's sessions, which are known by their numbers.

    ``take`` and ``vacate`` may be called from any thread, all else from the one that samples.

    Args:
        plan: Which endpoints there are.
        endpoints: For which of them each session is meant.
        names: Of the sessions, for the directories; see ``session_names``.
        node_id: Where the runner is.
        clock: Tells seconds.
        look: Looks at what the directories answer.
    """

    def __init__(
        self,
        plan: RolloutPlan,
        endpoints: Sequence[int],
        names: Sequence[str],
        node_id: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        look: Look = answer_if_there,
    ) -> None:
        self.endpoints = tuple(endpoints)
        self._names = tuple(names)
        self._numbers = {name: number for number, name in enumerate(names)}
        self._places = [plan.place_of(endpoint) for endpoint in endpoints]
        self._node_id = node_id
        self._clock = clock
        self._look = look
        self._lock = threading.Lock()
        self._seats: dict[int, Seat] = {}
        self._is_released = False
        directories = _distinct(directory for directory, _ in self._places)
        self._askable = [each for each in directories if not isinstance(each, FixedAddresses)]
        self._questions: list[_Question] = []
        self._asked_at_s: float | None = None

    def take(self, number: int) -> Seat:
        """Return the seat of a session; one that has none gets one. May take a while.

        Raises:
            EndpointUnreachableError: There is no endpoint for it now.
        """
        with self._lock:
            seat = self._seats.get(number)
        if seat is not None:
            return seat
        directory, index = self._places[number]
        seat = directory.claim(self._names[number], index, self._node_id)
        with self._lock:
            self._seats[number] = seat
            is_released = self._is_released
        if is_released:  # meanwhile
            directory.release([self._names[number]])
        return seat

    def vacate(self, numbers: Iterable[int]) -> None:
        """Forget the seats of sessions: whoever takes one gets another, or the same anew."""
        with self._lock:
            for number in numbers:
                self._seats.pop(number, None)

    def ask(self) -> None:
        """Ask which sessions are to move, if it is time. Never waits."""
        if not self._askable:
            return
        now_s = self._clock()
        if self._asked_at_s is not None:
            patience_s = _FORGET_AFTER_S if self._questions else _ASK_EVERY_S
            if now_s - self._asked_at_s < patience_s:
                return
        self._asked_at_s = now_s
        self._questions = []
        for directory in self._askable:
            seats = self._seats_with(directory)
            seated = {self._names[number]: seat.endpoint_id for number, seat in seats.items()}
            with contextlib.suppress(EndpointError):  # who would know is away
                survey = directory.survey(seated)
                if survey is not None:
                    self._questions.append(_Question(survey, seats))

    def asked_to_move(self) -> frozenset[int]:
        """Return which sessions are to move, by what has been answered since the last call."""
        if not self._questions:
            return frozenset()
        moving: set[int] = set()
        unanswered = []
        for question in self._questions:
            answer = self._look(question.survey)
            if answer is None:
                unanswered.append(question)
                continue
            for name in answer:
                number = self._numbers.get(name)
                seat = None if number is None else self._seats.get(number)
                if number is not None and seat and seat is question.seats.get(number):
                    moving.add(number)
        self._questions = unanswered
        return frozenset(moving)

    def endpoint_of(self, number: int) -> str:
        """Return what the endpoint is called where a session is; empty: it has no seat."""
        seat = self._seats.get(number)
        return (seat.endpoint_id or seat.address) if seat else ""

    def release(self) -> None:
        """Give all seats back. Neither waits nor raises."""
        with self._lock:
            self._is_released = True
            self._seats.clear()
        for directory in self._askable:
            directory.release([self._names[number] for number in self._numbers_of(directory)])

    def _seats_with(self, directory: Directory) -> dict[int, Seat]:
        numbers = self._numbers_of(directory)
        with self._lock:
            return {number: self._seats[number] for number in numbers if number in self._seats}

    def _numbers_of(self, directory: Directory) -> list[int]:
        return [number for number, place in enumerate(self._places) if place[0] == directory]


def session_names(
    plan_id: str, worker_index: int, num_sessions: int, *, in_evaluation: bool, runner: str
) -> list[str]:
    """Return the names of a runner's sessions, by number.

    Args:
        plan_id: Of the plan.
        worker_index: As RLlib counts.
        num_sessions: How many.
        in_evaluation: Whether it is an evaluation runner.
        runner: Tells runners of one plan apart: Tune has one plan for all trials.
    """
    group = "eval" if in_evaluation else "train"
    return [f"{plan_id}/{group}/{worker_index}/{each}@{runner}" for each in range(num_sessions)]


def runner_id() -> str:
    """Return what tells this runner apart: an actor that Ray restarts keeps it."""
    actor_id = ray.get_runtime_context().get_actor_id() if ray.is_initialized() else None
    return actor_id or secrets.token_hex(8)


def _distinct(directories: Iterable[Directory]) -> list[Directory]:
    """Return each directory once; they need not be hashable."""
    found: list[Directory] = []
    for directory in directories:
        if directory not in found:
            found.append(directory)
    return found
