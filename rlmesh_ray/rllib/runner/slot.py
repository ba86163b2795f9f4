"""One place among a runner's lanes: a group of sessions that goes its own way.

A slot is stepped, lost and opened again without the others. What takes time is done in a thread
of its own, and what comes of it arrives in one queue for all slots of the runner (``completions``).
"""

import contextlib
import enum
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlmesh_ray.errors import (
    EndpointClosedError,
    EndpointError,
    RemoteEnvError,
    RlmeshError,
)
from rlmesh_ray.polling import WakeupDescriptors
from rlmesh_ray.rllib.runner.completion_queue import CompletionQueue, Job
from rlmesh_ray.rllib.runner.retry_policy import RetryPolicy


class SlotGroup(Protocol):
    """Sessions that are stepped together; what they give, a slot passes on as it is."""

    def reset(self, seeds: Sequence[int] = (), options: Mapping[str, Any] | None = None) -> Any:
        """Start new episodes everywhere."""

    def send(self, actions: Any) -> None:
        """Apply one action a lane; ``receive`` returns the result."""

    def receive(self) -> Any:
        """Return what the actions that were sent have led to."""

    def wakeup(self) -> WakeupDescriptors | None:
        """Return what tells that ``receive`` has little to wait for; None: nothing does."""

    def call(self, name: str, arguments: Sequence[object]) -> tuple[Any, ...]:
        """Call into every lane."""

    def close(self) -> None:
        """End the sessions."""


class SlotPhase(enum.Enum):
    """What a slot is doing."""

    IDLE = enum.auto()
    """Nothing; it has observations that wait for actions."""
    STEPPING = enum.auto()
    RESETTING = enum.auto()
    OPENING = enum.auto()
    """It has lost its sessions, and gets new ones with new episodes."""


@dataclass(frozen=True, slots=True)
class SlotResult:
    """What came of a slot's work."""

    slot: "Slot"
    work: int
    """Which work; see ``Slot.is_current``."""
    batch: Any
    """What its group gave; None: it failed."""
    error: Exception | None = None
    """Why; anything but an RlmeshError is a fault that nobody has expected."""


class Slot:
    """Lanes that share their fate.

    To be used from one thread. Each of ``reset``, ``step`` and ``reopen`` leads to one arrival.

    Args:
        lanes: Which of the runner's.
        open_group: Opens the sessions; raises RlmeshError.
        completions: Where results go.
    """

    def __init__(
        self,
        lanes: range,
        open_group: Callable[[], SlotGroup],
        completions: CompletionQueue[SlotResult],
    ) -> None:
        self.lanes = lanes
        self.phase = SlotPhase.OPENING
        self.retry = RetryPolicy(num_lanes=len(lanes))
        self._open_group = open_group
        self._completions = completions
        self._group: SlotGroup | None = None
        self._jobs: queue.SimpleQueue[Job[SlotResult] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._left: Job[SlotResult] | None = None
        """What is being waited for in the thread, since its signal has not told for long."""
        self._closing = threading.Event()
        self._work = 0
        self._settings: dict[str, tuple[object, ...]] = {}
        self._is_behind = False

    def is_current(self, arrival: SlotResult) -> bool:
        """Tell whether an arrival is of the latest work; older ones interest nobody any more."""
        return arrival.work == self._work

    def open(self) -> None:
        """Open the sessions here and now.

        Raises:
            RlmeshError: They could not be opened.
        """
        self._group = self._open_group()
        self.phase = SlotPhase.IDLE

    def reset(self, seeds: Sequence[int], options: Mapping[str, Any] | None) -> None:
        """Start new episodes everywhere, after what it is doing.

        Args:
            seeds: Empty, or one a lane.
            options: Handed to the environments.
        """
        group = self._group
        assert group is not None, "an open slot"
        self.phase = SlotPhase.RESETTING
        self._begin(lambda: group.reset(seeds, options))

    def step(self, actions: Any) -> None:
        """Apply one action a lane.

        Raises:
            ConformanceError: ``actions`` has the wrong structure or dtype; nothing was sent.
        """
        group = self._group
        assert group is not None, "an open slot"
        receive: Callable[[], Any] = group.receive
        wakeup: WakeupDescriptors | None = None
        try:
            if self._is_behind:  # set while the group was on its way
                self._is_behind = False
                self._set_up(group)
            group.send(actions)
            wakeup = group.wakeup()
        except (EndpointError, RemoteEnvError) as error:
            receive = _raising(error)
        self.phase = SlotPhase.STEPPING
        self._begin(receive, wakeup)

    def call(self, name: str, arguments: tuple[object, ...]) -> tuple[Any, ...]:
        """Call into every lane; see ``EnvClient.call``.

        What was called with arguments is a setting: new sessions get the last one of each name,
        before their episodes begin. So does a slot that has none just now; it gives None a lane.

        Raises:
            ConfigurationError: The endpoints do not allow it.
            CodecError: An argument cannot travel.
            RemoteEnvError: An environment raised.
        """
        results: tuple[Any, ...] = (None,) * len(self.lanes)
        if self.phase is not SlotPhase.OPENING and self._group is not None:
            # A lost session is found out by its next step, and the new one gets the setting.
            with contextlib.suppress(EndpointError):
                results = self._group.call(name, arguments)
            # The answer to a step in flight came before it, and tells of itself no more.
            step = self._completions.unwatch(self)
            if step is not None:
                self._completions.defer(step)
        if arguments:
            self._settings[name] = arguments
            # Also where the call before this one has not been caught up with.
            self._is_behind = self._is_behind or self.phase is SlotPhase.OPENING
        return results

    def reopen(self, after_s: float, *, in_background: bool = False) -> None:
        """Get new sessions after some seconds, and start new episodes on them.

        Args:
            after_s: So long the slot is left alone.
            in_background: Whether it is to go on while nobody waits for it.
        """
        self.phase = SlotPhase.OPENING
        self._begin(lambda: self._renew(after_s), in_background=in_background)

    def close(self) -> None:
        """End the sessions. Idempotent."""
        self._closing.set()
        self._completions.unwatch(self)
        self._jobs.put(None)
        if self._group is not None:
            self._group.close()

    def _begin(
        self,
        function: Callable[[], Any],
        wakeup: WakeupDescriptors | None = None,
        *,
        in_background: bool = False,
    ) -> None:
        """Have ``function`` done: when ``wakeup`` tells, or in this slot's thread."""
        self._work += 1
        work = self._work

        def job() -> SlotResult:
            try:
                return SlotResult(self, work, function())
            except Exception as error:  # noqa: BLE001  # whoever samples is to hear of it
                return SlotResult(self, work, None, error)

        if wakeup is not None:
            self._completions.watch(wakeup, self, job, self._take_back)
            return
        do = self._do_in_thread
        if self._completions.are_deferred and not in_background and self._left is None:
            do = self._completions.defer
        before = self._completions.unwatch(self)
        if before is not None:  # work that nobody waits for any more comes first all the same
            do(before)
        do(job)

    def _take_back(self, job: Job[SlotResult]) -> None:
        self._left = job
        self._do_in_thread(job)

    def _do_in_thread(self, job: Job[SlotResult]) -> None:
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rlmesh-ray-slot", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            arrival = job()
            if job is self._left:
                self._left = None
            self._completions.put(arrival)

    def _renew(self, after_s: float) -> Any:
        if self._group is not None:
            self._group.close()
        if self._closing.wait(after_s):
            raise EndpointClosedError("the runner has been stopped", "")
        group = self._open_group()
        self._group = group
        if self._closing.is_set():  # meanwhile, and it closed the group before this one
            group.close()
        self._set_up(group)
        return group.reset()

    def _set_up(self, group: SlotGroup) -> None:
        for name, arguments in list(self._settings.items()):
            group.call(name, arguments)


def _raising(error: RlmeshError) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail
