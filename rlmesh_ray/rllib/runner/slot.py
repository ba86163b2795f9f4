"""A slot of a runner: a group of sessions that is stepped, lost and reopened independently.

And when to open its sessions again, and when to give up, after failures.
"""

import contextlib
import enum
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlmesh_ray.errors import (
    AccessDeniedError,
    ConfigurationError,
    ConformanceError,
    EndpointClosedError,
    EndpointError,
    HandshakeRefusedError,
    RemoteEnvError,
    RlmeshError,
)
from rlmesh_ray.polling import WakeupDescriptors
from rlmesh_ray.protocol.capabilities import SET_ATTR
from rlmesh_ray.rllib.runner.completion_queue import CompletionQueue
from rlmesh_ray.rllib.runner.session_group import SessionGroup

# An endpoint that Ray restarts answers again after 2 s; Ray notices a node that is lost silently
# after a minute, and restarts its actors elsewhere.
_GIVE_UP_AFTER_S = 120.0
_FIRST_DELAY_S = 0.25
_LONGEST_DELAY_S = 1.0
_MAX_ENV_FAILURES = 10
_ENV_DELAY_S = 0.1
_NOT_RETRIED = (
    AccessDeniedError,
    ConfigurationError,
    ConformanceError,
    HandshakeRefusedError,
)
"""Errors after which another attempt would fail in the same way."""


class RetryPolicy:
    """Decides when to try again, and when to give up.

    An endpoint that is away is tried again for some time, at growing intervals; the first attempt
    is made at once. An environment that raises is tried again ten times until it finishes an
    episode: an attempt makes a new environment, which may work, or it may be broken for good.

    Args:
        give_up_after_s: How long an endpoint may stay away.
    """

    def __init__(self, give_up_after_s: float = _GIVE_UP_AFTER_S) -> None:
        self._give_up_after_s = give_up_after_s
        self.num_failures = 0
        """Failures since the last success."""
        self.num_raised = 0
        """Errors of the environment since it finished an episode."""
        self._since_s: float | None = None
        self._next_report_s = 0.0
        """How long an endpoint has been away when its absence is reported next."""

    def succeeded(self) -> None:
        self.num_failures = 0
        self._since_s = None
        self._next_report_s = 0.0

    def finished_episode(self) -> None:
        self.num_raised = 0

    def failed(
        self, error: RlmeshError, now_s: float, *, others_work: bool = False
    ) -> float | None:
        """Return after how many seconds to try again; None: give up.

        Args:
            error: The failure.
            now_s: The time by any monotonic clock.
            others_work: Whether other slots sample: the endpoint may stay away without limit then.
        """
        self.num_failures += 1
        if self._since_s is None:
            self._since_s = now_s
        if isinstance(error, _NOT_RETRIED):
            return None
        if not isinstance(error, EndpointError):
            self.num_raised += 1
            if self.num_raised > _MAX_ENV_FAILURES:
                return None
            return _delay_s(_ENV_DELAY_S, self.num_raised)
        if now_s - self._since_s > self._give_up_after_s and not others_work:
            return None
        return _delay_s(_FIRST_DELAY_S, self.num_failures)

    def absence_to_report(self, now_s: float) -> tuple[float, float] | None:
        """Return for how long an endpoint has been away, and after how many seconds it is given up.

        None: this failure is not reported. The first one is, and others after 1, 2, 4, 8, ...
        seconds, so that a long absence does not fill the log.
        """
        away_s = 0.0 if self._since_s is None else now_s - self._since_s
        if away_s < self._next_report_s:
            return None
        while self._next_report_s <= away_s:
            self._next_report_s = max(2.0 * self._next_report_s, 1.0)
        return away_s, max(self._give_up_after_s - away_s, 0.0)


def _delay_s(first_s: float, num_tries: int) -> float:
    if num_tries <= 1:
        return 0.0
    return min(first_s * 2.0 ** (num_tries - 2), _LONGEST_DELAY_S)


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
    """Number of the work; one of an earlier work than ``Slot.work`` is to be ignored."""
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
        sessions: Numbers of the slot's sessions among those of the runner.
    """

    def __init__(
        self,
        lanes: range,
        open_group: Callable[[], SessionGroup],
        completions: CompletionQueue[SlotResult],
        sessions: range = range(1),
    ) -> None:
        self.lanes = lanes
        self.sessions = sessions
        self.phase = SlotPhase.OPENING
        self.retry = RetryPolicy()
        # What a sampling path keeps between two steps.
        self.shared_data: dict[str, Any] = {}
        """RLlib's connectors exchange data in this, between the two pipelines of one step."""
        self.to_module: Any = None
        """The next forward pass's input."""
        self.actions: Any = None
        """The module's actions, for the episodes; those for the environment may differ."""
        self.extras: dict[str, Any] | None = None
        """The module's other outputs, one row for each lane."""
        self.num_in_flight = 0
        """Timesteps that were requested and have not arrived."""
        self._open_group = open_group
        self._completions = completions
        self._group: SessionGroup | None = None
        self._closing = threading.Event()
        self.work = 0
        """Number of the latest work."""
        self._settings: dict[object, tuple[str, tuple[object, ...]]] = {}
        self._is_behind = False

    def open(self) -> None:
        """Open the sessions, in this thread.

        Raises:
            RlmeshError: They could not be opened.
        """
        self._group = self._open_group()
        self.phase = SlotPhase.IDLE

    def reset(self, seeds: Sequence[int]) -> None:
        """Start new episodes everywhere, after the work in progress.

        Args:
            seeds: Empty, or one for each lane.
        """
        group = self._group
        assert group is not None, "an open slot"
        self.phase = SlotPhase.RESETTING
        self._begin(lambda: group.reset(seeds))

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
            self._completions.stop_watching(self)
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
        self.to_module = None
        self.shared_data = {}
        self._begin(lambda: self._renew(after_s), in_background=in_background)

    def close(self) -> None:
        self._closing.set()
        if self._group is not None:
            self._group.close()

    def _begin(
        self,
        function: Callable[[], Any],
        wakeup: WakeupDescriptors | None = None,
        *,
        in_background: bool = False,
    ) -> None:
        self.work += 1
        work = self.work

        def job() -> SlotResult:
            try:
                return SlotResult(self, work, function())
            except Exception as error:  # noqa: BLE001  # the sampling thread handles it
                return SlotResult(self, work, None, error)

        self._completions.submit(self, job, wakeup, in_background=in_background)

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

    def _set_up(self, group: SessionGroup) -> None:
        for name, arguments in list(self._settings.values()):
            group.call(name, arguments)


def _raising(error: RlmeshError) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail
