"""Adaptive spinning: polling descriptors for a short time before sleeping on them.

Waking a sleeping process takes 20 to 200 us, most of all in a virtual machine; a poll takes 2 us.
So a wait that follows short waits polls for about as long as those took, and sleeps afterwards.
Where the processor is scarce, the next waits sleep at once. With ``RLMESH_RAY_SPIN=0`` in the
environment every wait does.
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

SPIN_VARIABLE = "RLMESH_RAY_SPIN"
"""Environment variable: 0 or 1, the default."""

_MOST_POLLS = 64
_LONGEST_POLL_MS = 2**31 - 1
_MARGIN = 1.5
_WEIGHT = 0.125
"""Weight of the latest wait in the moving average."""
_LONG = 2.0
"""Longest wait that counts, as a multiple of ``longest_s``: one long wait changes little."""
_GAIN = 0.97
"""Spinning costs a processor: it must shorten waits by 3 % to be kept."""
_TRIAL, _SETTLING = 24, 8
"""Waits of each mode that a trial compares, and waits before them that it ignores."""
_FEWEST_BETWEEN, _MOST_BETWEEN = 64, 4096
"""Waits from the end of a trial to the end of the next one's first half."""

ResultT = TypeVar("ResultT")
IdleWork = Callable[[], bool]
"""Does a small piece of deferred work; returns False when there was none."""


yield_cpu: Callable[[], None] = getattr(os, "sched_yield", lambda: None)
"""Let other processes of this processor run; some kernels give each of them a whole time slice."""


def should_spin() -> bool:
    """Return whether waits may spin; never where the system has no ``sched_yield``."""
    value = os.environ.get(SPIN_VARIABLE) or "1"
    if value not in {"0", "1"}:
        raise ConfigurationError(
            f"{SPIN_VARIABLE}={value!r}: 0 makes every wait sleep at once; 1, the default, "
            "lets short ones spin"
        )
    return value == "1" and hasattr(os, "sched_yield")


def keep_cpu() -> None:
    """Do nothing between two polls."""


def no_work() -> bool:
    """Do nothing while spinning."""
    return False


@dataclass(frozen=True, slots=True)
class WakeupDescriptors:
    """The descriptors of one end of a direct connection that a reader polls."""

    eventfd: int
    """Readable when the peer has sent something."""
    peer: int
    """The connection's socket; its hang-up says that nothing will come any more."""


def use_batch_scheduling() -> None:
    """Set SCHED_BATCH, so that waking this process does not preempt the process that wakes it.

    For servers: a client that has sent a request has other work, and loses half a step and more if
    the server takes its processor at once. The priority is unchanged: both get the same share.
    Threads and processes that start later inherit it.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # where this is not allowed, it is only slower
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class AdaptiveSpin:
    """Spin duration that is learned from earlier waits. For one thread.

    Whether spinning pays is found by trial: where other processes want the processor, or the peer
    needs it to answer, waits that sleep at once may be shorter. From time to time some waits in a
    row use the other mode; each trial that changes nothing doubles the time to the next.

    Args:
        longest_s: Longest spin; after waits that usually take longer, none spins.
        pause: Called between two polls: ``yield_cpu``, or ``keep_cpu`` for the one process that all
            others wait for.
    """

    def __init__(self, longest_s: float, *, pause: Callable[[], None] = yield_cpu) -> None:
        self._longest_s = longest_s if should_spin() else 0.0
        self._pause = pause
        self._usual_s = self._longest_s
        self.spin_s = 0.0
        """Spin duration of the next wait; 0.0 where it sleeps at once."""
        self._began_s = 0.0
        self._is_spinning = True
        """Whether short waits spin outside of trials; a trial inverts it."""
        self._is_trial = False
        self._num_left = self._num_between = _FEWEST_BETWEEN
        self._waits_s = 0.0
        """Sum of the latest waits in the present mode."""
        self._former_waits_s = 0.0

    def begin(self) -> None:
        """Note the start of a wait whose caller does the spinning."""
        self._began_s = time.perf_counter()

    def spin(
        self,
        poll: Callable[[], ResultT],
        limit_s: float | None = None,
        meanwhile: IdleWork = no_work,
    ) -> ResultT:
        """Start a wait: call ``poll`` until its result is true, or it is time to sleep.

        ``poll`` never blocks. ``limit_s`` is the longest spin; None: the learned duration.
        ``meanwhile`` is called between two polls; spinning continues while it returns True.
        """
        self._began_s = began_s = time.perf_counter()
        spin_s = self.spin_s if limit_s is None else min(self.spin_s, limit_s)
        result = poll()
        while not result and (meanwhile() or time.perf_counter() - began_s < spin_s):
            self._pause()
            result = poll()
        return result

    def learn(self) -> None:
        """Note the end of the latest wait, and compute the next spin duration from it."""
        waited_s = min(time.perf_counter() - self._began_s, _LONG * self._longest_s)
        self._usual_s += _WEIGHT * (waited_s - self._usual_s)
        wanted_s = _MARGIN * self._usual_s
        if wanted_s > self._longest_s:
            self.spin_s = 0.0
            return
        self._num_left -= 1
        if self._num_left < _TRIAL:
            self._waits_s += waited_s
        if not self._num_left:
            self._end_period()
        self.spin_s = wanted_s if self._is_spinning is not self._is_trial else 0.0

    def _end_period(self) -> None:
        """Start a trial; at the end of one choose the better mode."""
        waits_s, self._waits_s = self._waits_s, 0.0
        self._is_trial = not self._is_trial
        if self._is_trial:
            self._former_waits_s, self._num_left = waits_s, _TRIAL + _SETTLING
            return
        spinning_s, sleeping_s = (
            (self._former_waits_s, waits_s)
            if self._is_spinning
            else (waits_s, self._former_waits_s)
        )
        is_spinning = spinning_s < _GAIN * sleeping_s
        is_as_before, self._is_spinning = is_spinning is self._is_spinning, is_spinning
        between = 2 * self._num_between if is_as_before else _FEWEST_BETWEEN
        self._num_left = self._num_between = min(between, _MOST_BETWEEN)


class AdaptivePoller:
    """Waits for descriptors with an adaptive spin. For one thread; on Linux."""

    def __init__(self, longest_spin_s: float, *, pause: Callable[[], None] = yield_cpu) -> None:
        self._spin = AdaptiveSpin(longest_spin_s, pause=pause)
        self._polls: dict[tuple[tuple[int, ...], tuple[int, ...]], select.poll] = {}

    def wait_readable(
        self,
        *descriptors: int,
        peers: Sequence[int] = (),
        timeout_s: float | None = None,
        meanwhile: IdleWork = no_work,
    ) -> list[int]:
        """Wait until a descriptor is readable, or it or one of the ``peers`` has hung up.

        Return those descriptors; none after ``timeout_s``. For ``meanwhile`` see ``AdaptiveSpin``.
        """
        key = descriptors, tuple(peers)
        poller = self._polls.get(key) or self._new_poller(*key)
        events = self._spin.spin(partial(poller.poll, 0), timeout_s, meanwhile)
        if not events:
            limit_ms = None if timeout_s is None else min(timeout_s * 1000, _LONGEST_POLL_MS)
            events = poller.poll(limit_ms)
        self._spin.learn()
        return [descriptor for descriptor, _ in events]

    def _new_poller(self, descriptors: tuple[int, ...], peers: tuple[int, ...]) -> select.poll:
        if len(self._polls) >= _MOST_POLLS:
            self._polls.clear()
        poller = select.poll()  # not select: it fails for descriptors above 1023
        for descriptor in descriptors:
            poller.register(descriptor, select.POLLIN)
        # Registering a descriptor again would replace its POLLIN.
        for descriptor in set(peers).difference(descriptors):
            poller.register(descriptor, 0)
        self._polls[descriptors, peers] = poller
        return poller
