"""Which steps are on their way: those that simulators are making, as far as one can count on it."""

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

_FIRST_S = 5.0
"""How long a simulator is counted on that has not brought anything yet."""
_LEAST_S, _TIMES = 1.0, 3.0
"""And one that has: so many times as long as it took last, and so long at least."""


@dataclass(slots=True, eq=False)
class _Rollout:
    num_steps: int
    """That are still to come."""
    seq_no: int
    began_s: float
    due_s: float


class InflightSteps:
    """Who makes how many steps; one errand each at a time, and one thread at a time.

    Args:
        clock: Tells the time, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rollouts: dict[object, _Rollout] = {}
        self._seconds: weakref.WeakKeyDictionary[object, float] = weakref.WeakKeyDictionary()

    def begin(self, owner: object, num_steps: int, seq_no: int) -> None:
        """Note that a simulator begins to make steps.

        If it begins again without having sent the steps before, its deadline stays as it was:
        the others would wait for as long as it requests weights and makes no step.

        Args:
            owner: Who.
            num_steps: How many steps it will bring.
            seq_no: Of the weights that act.
        """
        former = self._rollouts.get(owner)
        if former is not None:
            self._rollouts[owner] = _Rollout(num_steps, seq_no, former.began_s, former.due_s)
            return
        now_s = self._clock()
        seconds = self._seconds.get(owner)
        patience_s = _FIRST_S if seconds is None else max(_LEAST_S, _TIMES * seconds)
        self._rollouts[owner] = _Rollout(num_steps, seq_no, now_s, now_s + patience_s)

    def note_received(self, owner: object, num_steps: int) -> None:
        """Note that some of its steps have come; with the last one, the errand ends."""
        errand = self._rollouts.get(owner)
        if errand is not None:
            errand.num_steps -= num_steps
            if errand.num_steps <= 0:
                self.end(owner)

    def end(self, owner: object) -> None:
        """Note that nothing more of it is on its way."""
        errand = self._rollouts.pop(owner, None)
        if errand is not None:
            self._seconds[owner] = self._clock() - errand.began_s

    def num_expected(self, is_fresh: Callable[[int], bool]) -> int:
        """Return how many steps can be counted on, of weights that ``is_fresh`` approves of."""
        now_s = self._clock()
        return sum(
            errand.num_steps
            for errand in self._rollouts.values()
            if now_s < errand.due_s and is_fresh(errand.seq_no)
        )
