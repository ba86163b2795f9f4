"""A slot of a runner: a group of sessions that is stepped, lost and reopened independently.

What takes time runs in a thread of the slot, and its results go into one queue for all slots of the
runner (``completions``).
"""

import contextlib
import enum
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlmesh_ray.errors import EndpointClosedError, EndpointError, RemoteEnvError, RlmeshError
from rlmesh_ray.polling import WakeupDescriptors
from rlmesh_ray.protocol.capabilities import SET_ATTR
from rlmesh_ray.rllib.runner.completion_queue import CompletionQueue, Job
from rlmesh_ray.rllib.runner.session_retry import RetryPolicy


class SlotGroup(Protocol):
    """Sessions that are stepped together; a slot passes their results on unchanged."""

    def reset(self, seeds: Sequence[int] = (), options: Mapping[str, Any] | None = None) -> Any:
        """Start new episodes everywhere."""

    def send(self, actions: Any) -> None:
        """Apply one action in each lane; ``receive`` returns the result."""

    def receive(self) -> Any:
        """Return the result of the actions that were sent."""

    def wakeup(self) -> WakeupDescriptors | None:
        """Return descriptors that signal that ``receive`` need not wait; None: there are none."""

    def call(self, name: str, arguments: Sequence[object]) -> tuple[Any, ...]:
        """Call into every lane."""

    def close(self) -> None:
        """End the sessions."""


class SlotPhase(enum.Enum):
    """The state of a slot."""

    IDLE = enum.auto()
    """It has observations, and needs actions."""
    STEPPING = enum.auto()
    RESETTING = enum.auto()
    OPENING = enum.auto()
    """It has lost its sessions; new ones are being opened, with new episodes."""


@dataclass(frozen=True, slots=True)
class SlotResult:
    """The result of a slot's work: a batch or an error."""

    slot: "Slot"
    work: int
    """Number of the work; see ``Slot.is_current``."""
    batch: Any
    """The result of its group; None: it failed."""
    error: Exception | None = None
    """The cause of the failure; any error but an RlmeshError is a defect."""


class Slot:
    """Lanes that are stepped, lost and reopened together.

    Not thread-safe. Each of ``reset``, ``step`` and ``reopen`` leads to one result.

    Args:
        lanes: Numbers of the lanes among the runner's.
        open_group: Opens the sessions; raises RlmeshError.
        completions: Gets the results.
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
        """The job that the thread runs since its signal has not arrived for long."""
        self._closing = threading.Event()
        self._work = 0
        self._settings: dict[object, tuple[str, tuple[object, ...]]] = {}
        self._is_behind = False

    def is_current(self, result: SlotResult) -> bool:
        """Return whether a result is that of the latest work; older ones are to be ignored."""
        return result.work == self._work

    def open(self) -> None:
        """Open the sessions, in this thread.

        Raises:
            RlmeshError: They could not be opened.
        """
        self._group = self._open_group()
        self.phase = SlotPhase.IDLE

    def reset(self, seeds: Sequence[int], options: Mapping[str, Any] | None) -> None:
        """Start new episodes everywhere, after the work in progress.

        Args:
            seeds: Empty, or one for each lane.
            options: Passed to the environments.
        """
        group = self._group
        assert group is not None, "an open slot"
        self.phase = SlotPhase.RESETTING
        self._begin(lambda: group.reset(seeds, options))

    def step(self, actions: Any) -> None:
        """Apply one action in each lane.

        Raises:
            ConformanceError: ``actions`` has the wrong structure or dtype; nothing was sent.
        """
        group = self._group
        assert group is not None, "an open slot"
        receive: Callable[[], Any] = group.receive
        wakeup: WakeupDescriptors | None = None
        try:
            if self._is_behind:  # a setting was made while the group was being opened
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

        A call with arguments is a setting: the last one of each name, and of each attribute that
        is set, is repeated in new sessions, before their episodes begin. A slot without open
        sessions returns None for each lane.

        Raises:
            ConfigurationError: The endpoints do not allow it.
            CodecError: An argument cannot be encoded.
            RemoteEnvError: An environment raised.
        """
        results: tuple[Any, ...] = (None,) * len(self.lanes)
        if self.phase is not SlotPhase.OPENING and self._group is not None:
            # The next step reports a lost session, and the new one gets the setting.
            with contextlib.suppress(EndpointError):
                results = self._group.call(name, arguments)
            # The call has read the answer of a step in flight: its signal will not come any more.
            step = self._completions.unwatch(self)
            if step is not None:
                self._completions.defer(step)
        if arguments:
            key = (name, arguments[0]) if name == SET_ATTR else name
            self._settings[key] = name, arguments
            # Also where an earlier setting has not been repeated yet.
            self._is_behind = self._is_behind or self.phase is SlotPhase.OPENING
        return results

    def reopen(self, after_s: float, *, in_background: bool = False) -> None:
        """Open new sessions after some seconds, and start new episodes in them.

        Args:
            after_s: The delay.
            in_background: Whether it proceeds while no ``take`` waits for results.
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
        """Run ``function`` when ``wakeup`` signals, or in this slot's thread."""
        self._work += 1
        work = self._work

        def job() -> SlotResult:
            try:
                return SlotResult(self, work, function())
            except Exception as error:  # noqa: BLE001  # the sampling thread handles it
                return SlotResult(self, work, None, error)

        if wakeup is not None:
            self._completions.watch(wakeup, self, job, self._take_back)
            return
        do = self._do_in_thread
        if self._completions.are_deferred and not in_background and self._left is None:
            do = self._completions.defer
        before = self._completions.unwatch(self)
        if before is not None:  # superseded work has to be completed first all the same
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
            result = job()
            if job is self._left:
                self._left = None
            self._completions.put(result)

    def _renew(self, after_s: float) -> Any:
        if self._group is not None:
            self._group.close()
        if self._closing.wait(after_s):
            raise EndpointClosedError("the runner has been stopped", "")
        group = self._open_group()
        self._group = group
        if self._closing.is_set():  # in the meantime: ``close`` has closed the former group
            group.close()
        self._set_up(group)
        return group.reset()

    def _set_up(self, group: SlotGroup) -> None:
        for name, arguments in list(self._settings.values()):
            group.call(name, arguments)


def _raising(error: RlmeshError) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail
