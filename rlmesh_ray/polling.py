"""Waiting for descriptors, where what is waited for takes about as long as being woken.

To be woken takes a process 20 to 200 us, most of all where the system is itself a guest of another
one; to look takes two. So who has waited for a short time only looks again for about as long
before it goes to sleep, and lets others have the processor between two looks. Where another program
takes it then and keeps it, processors are scarce: the next waits sleep at once. With ``spin=False``
every wait does; ``RLMESH_RAY_SPIN`` in the environment is the default of ``spin``.
"""

import contextlib
import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.options import require_flag

SPIN_VARIABLE = "RLMESH_RAY_SPIN"
"""Of the environment: 0 or 1, the default of ``spin`` wherever that is a parameter."""

_MOST_POLLS = 64
_LONGEST_POLL_MS = 2**31 - 1
_MARGIN = 1.5
_WEIGHT = 0.125
"""Of the latest wait in what is usual."""
_LONG = 2.0
"""In longest looks: a longer wait counts as one of that, so that a single one changes little."""
_GAIN = 0.97
"""Looking costs a processor: it has to make waits shorter by 3 %."""
_TRIAL, _SETTLING = 24, 8
"""Waits that are compared with as many of the other way, and those before them that are not."""
_FEWEST_BETWEEN, _MOST_BETWEEN = 64, 4096
"""Waits from the end of a trial to the end of the next one's first half."""

ResultT = TypeVar("ResultT")
IdleWork = Callable[[], bool]
"""Does a little that has to be done at some time; False: there was nothing to do."""


_yield_cpu: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


def should_spin(spin: bool | None = None) -> bool:
    """Tell whether waits may look again and again.

    Args:
        spin: What the user says; None: as ``RLMESH_RAY_SPIN`` says, and yes where that is unset or
            empty.

    Raises:
        ConfigurationError: ``spin`` is neither True, False nor None, or it is None and
            ``RLMESH_RAY_SPIN`` is neither 0 nor 1.
    """
    require_flag("spin", spin, allow_none=True)
    if spin is not None:
        return spin and hasattr(os, "sched_yield")
    told = os.environ.get(SPIN_VARIABLE) or "1"
    if told not in {"0", "1"}:
        raise ConfigurationError(
            f"{SPIN_VARIABLE}={told!r}: 0 has every wait sleep at once; 1, as without it, "
            "lets short ones stay awake"
        )
    return told == "1" and hasattr(os, "sched_yield")


def no_work() -> bool:
    """Do nothing meanwhile."""
    return False


@dataclass(frozen=True, slots=True)
class WakeupDescriptors:
    """Descriptors that tell of one thing."""

    eventfd: int
    """Readable when it has happened."""
    peer: int
    """Of a socket whose other end is gone when it will not happen any more."""


def use_batch_scheduling() -> None:
    """Let whoever wakes this process keep the processor, where there is no other one for it.

    For processes that answer: who asks them has something else to do meanwhile, and is held up by
    half a step and more if the answer is worked on in its place. It is no question of priority:
    both get the same share. Threads and processes that begin later do likewise.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # where this is not allowed, it is only slower
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class AdaptiveSpin:
    """Learns from each wait for how long to look in the next one. For one thread.

    Whether to look at all it finds out by trying: where others want the processor, or the other end
    needs it to answer, waits that sleep at once may be the shorter ones. Some waits in a row are
    done the other way now and then, the more seldom the more often that has changed nothing.

    Args:
        longest_s: For how long at most; whoever has waited for longer than that goes to sleep at
            once the next time.
        spin: False: never; see ``should_spin``.
    """

    def __init__(self, longest_s: float, spin: bool | None = None) -> None:
        self._longest_s = longest_s if should_spin(spin) else 0.0
        self._usual_s = self._longest_s
        self._spin_s = 0.0
        self._began_s = 0.0
        self._is_spinning = True
        """Whether short waits look, unless it is being tried what others do."""
        self._is_trying = False
        self._num_left = self._num_between = _FEWEST_BETWEEN
        self._waits_s = 0.0
        """Of the latest waits of one way, summed up."""
        self._former_waits_s = 0.0

    @property
    def spin_s(self) -> float:
        """For how long to look in the next wait; 0.0: not at all."""
        return self._spin_s

    def begin(self) -> None:
        """Take notice that a wait begins, which is somebody else's to look in."""
        self._began_s = time.perf_counter()

    def spin(
        self,
        is_there: Callable[[], ResultT],
        most_s: float | None = None,
        meanwhile: IdleWork = no_work,
    ) -> ResultT:
        """Begin to wait: ask ``is_there`` once, and again for about as long as it took before.

        Args:
            is_there: Tells at once, by something true.
            most_s: For how long at most; None: as has been learned.
            meanwhile: Done between two looks, for as long as there is something to do.

        Returns:
            What it told last.
        """
        self._began_s = began_s = time.perf_counter()
        spin_s = self._spin_s if most_s is None else min(self._spin_s, most_s)
        there = is_there()
        while not there and (meanwhile() or time.perf_counter() - began_s < spin_s):
            _yield_cpu()
            there = is_there()
        return there

    def learn(self) -> None:
        """Take notice that the wait which began last has ended now, whoever waited."""
        waited_s = min(time.perf_counter() - self._began_s, _LONG * self._longest_s)
        self._usual_s += _WEIGHT * (waited_s - self._usual_s)
        wanted_s = _MARGIN * self._usual_s
        if wanted_s > self._longest_s:
            self._spin_s = 0.0
            return
        self._compare(waited_s)
        self._spin_s = wanted_s if self._is_spinning is not self._is_trying else 0.0

    def _compare(self, waited_s: float) -> None:
        """Count a short wait; after some, try the other way, or choose between both."""
        self._num_left -= 1
        if self._num_left < _TRIAL:
            self._waits_s += waited_s
        if self._num_left:
            return
        waits_s, self._waits_s = self._waits_s, 0.0
        self._is_trying = not self._is_trying
        if self._is_trying:
            self._former_waits_s, self._num_left = waits_s, _TRIAL + _SETTLING
            return
        looking_s, sleeping_s = (
            (self._former_waits_s, waits_s)
            if self._is_spinning
            else (waits_s, self._former_waits_s)
        )
        is_spinning = looking_s < _GAIN * sleeping_s
        is_as_before, self._is_spinning = is_spinning is self._is_spinning, is_spinning
        between = 2 * self._num_between if is_as_before else _FEWEST_BETWEEN
        self._num_left = self._num_between = min(between, _MOST_BETWEEN)


class AdaptivePoller:
    """Waits for descriptors, each time as the times before have taught. For one thread; on Linux.

    Args:
        longest_spin_s: See ``AdaptiveSpin``.
        spin: See ``should_spin``.
    """

    def __init__(self, longest_spin_s: float, spin: bool | None = None) -> None:
        self._spin = AdaptiveSpin(longest_spin_s, spin)
        self._polls: dict[tuple[tuple[int, ...], tuple[int, ...]], select.poll] = {}

    def wait_readable(
        self,
        *descriptors: int,
        peers: Sequence[int] = (),
        timeout_s: float | None = None,
        meanwhile: IdleWork = no_work,
    ) -> list[int]:
        """Wait until something can be read, or the other end is gone.

        Args:
            descriptors: Open ones.
            peers: Sockets of which only the end matters.
            timeout_s: None: as long as it takes.
            meanwhile: See ``AdaptiveSpin.spin``.

        Returns:
            Those of which that is true; none: it took longer than ``timeout_s``.
        """
        waiting = self._poll_for(descriptors, tuple(peers))
        events = self._spin.spin(partial(waiting.poll, 0), timeout_s, meanwhile)
        if not events:
            limit_ms = None if timeout_s is None else min(timeout_s * 1000, _LONGEST_POLL_MS)
            events = waiting.poll(limit_ms)
        self._spin.learn()
        return [descriptor for descriptor, _ in events]

    def _poll_for(self, descriptors: tuple[int, ...], peers: tuple[int, ...]) -> select.poll:
        waiting = self._polls.get((descriptors, peers))
        if waiting is None:
            if len(self._polls) >= _MOST_POLLS:
                self._polls.clear()
            waiting = select.poll()  # not select: it fails for descriptors above 1023
            for descriptor in descriptors:
                waiting.register(descriptor, select.POLLIN)
            for descriptor in set(peers).difference(descriptors):  # else it would count as one
                waiting.register(descriptor, 0)
            self._polls[descriptors, peers] = waiting
        return waiting
