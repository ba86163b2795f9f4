"""What a runner does about sessions that end in the middle: those that fail, and those that move.

Either way their running episodes end where they stand, and new sessions are opened.
"""

import abc
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.env.env_runner import NUM_ENV_STEP_FAILURES_LIFETIME, EnvRunner
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED

from rlmesh_ray.errors import EndpointClosedError, RemoteEnvError, RlmeshError
from rlmesh_ray.rllib.runner.next_step_session import unusable_step
from rlmesh_ray.rllib.runner.sample_budget import SampleBudget
from rlmesh_ray.rllib.runner.session_assignments import SessionAssignments
from rlmesh_ray.rllib.runner.slot import Slot, SlotPhase
from rlmesh_ray.rllib.runner.slot_state import SlotState

_LOG = logging.getLogger(__name__)

_ASK_S = 10.0

NUM_EPISODES_INTERRUPTED_LIFETIME = "num_episodes_interrupted_lifetime"
"""Metric: episodes that a failure has cut short."""
NUM_SESSIONS_MOVED_LIFETIME = "num_sessions_moved"
"""Metric: sessions that have gone to another endpoint because the directory asked them to."""


class SessionRecovery(EnvRunner):
    """Sees to the sessions that a ``SlotRunner`` loses, and to those that are to go elsewhere."""

    _slots: Sequence[SlotState] = ()
    _assignments: SessionAssignments
    _budget: SampleBudget
    _ongoing_episodes: list[Any]
    _interrupted: list[Any]
    """Episodes that were cut short in this call of ``sample``."""
    _has_discarded = False
    first_failure = ""
    """What first cut episodes short in this runner, and in which lanes; empty: nothing has."""
    broken_environment: RemoteEnvError | None = None
    """Why the last call of ``sample`` gave up; see ``raise_for_broken_environment``."""

    def apply(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``func`` with this runner, as RLlib's runners do.

        RLlib ends a runner that raises, after a minute, and another one takes its place. That
        mends no environment.
        """
        try:
            return super().apply(_let_escape(func), *args, **kwargs)
        except _EscapingError as caught:
            raise caught.error from None

    @abc.abstractmethod
    def _truncate(self, lane: int, cause: Exception | str) -> Any | None:
        """End a lane's running episode; return it unless all it holds has been returned before."""

    # --- failures ------------------------------------------------------------------------

    def _reopen(self, state: SlotState, error: Exception) -> None:
        """End the episodes of a slot that has failed, and have it opened again.

        Raises:
            Exception: There is no use in that, or it is a fault: ``error`` itself.
        """
        slot = state.slot
        if not isinstance(error, RlmeshError):
            slot.reopen(0.0)
            raise error
        if slot.phase is not SlotPhase.OPENING:
            self.metrics.log_value(NUM_ENV_STEP_FAILURES_LIFETIME, 1, reduce="lifetime_sum")
        slot.phase = SlotPhase.OPENING
        self._assignments.drop(state.sessions)
        num_cut = self._interrupt(slot, error)
        if num_cut:
            key = NUM_EPISODES_INTERRUPTED_LIFETIME
            self.metrics.log_value(key, num_cut, reduce="lifetime_sum")
        others_work = any(other.slot.phase is not SlotPhase.OPENING for other in self._slots)
        delay_s = slot.retry.failed(error, time.monotonic(), others_work=others_work)
        num_raised = slot.retry.num_env_failures
        if delay_s is None:
            self._reset_retries(slot)
            slot.reopen(0.0)
            if isinstance(error, RemoteEnvError) and num_raised > 1:
                self.broken_environment = _broken(error, num_raised)
                raise self.broken_environment from error
            raise error
        self.first_failure = self.first_failure or f"{_lanes_of(slot)}: {error}"
        _LOG.warning(
            "worker %s, lanes %d to %d: %s; a new session is opened in %.2g s (failure %d)",
            self.worker_index,
            slot.lanes.start,
            slot.lanes.stop - 1,
            error,
            delay_s,
            max(slot.retry.num_failures, num_raised),
        )
        state.to_module = None
        state.shared_data = {}
        slot.reopen(delay_s)

    def _interrupt(self, slot: Slot, cause: RlmeshError) -> int:
        """Cut a slot's running episodes short, to be returned; return how many they are."""
        is_begun = [self._ongoing_episodes[lane].is_reset for lane in slot.lanes]
        for lane in itertools.compress(slot.lanes, is_begun):  # in the others nothing has happened
            self._interrupt_lane(lane, cause)
        return sum(is_begun)

    def _interrupt_lane(self, lane: int, cause: Exception | str) -> None:
        """Cut a lane's running episode short, to be returned."""
        episode = self._ongoing_episodes[lane]
        returned = self._truncate(lane, cause)
        self._ongoing_episodes_for_metrics.pop(episode.id_, None)
        if returned is not None:
            self._interrupted.append(returned)

    # --- steps that cannot be used ----------------------------------------------------------

    def _count_discarded(self, state: SlotState, discarded: Mapping[int, str]) -> None:
        """Count episodes that end before a step which must not reach a learner.

        Args:
            state: Of which slot.
            discarded: By its lanes: why.

        Raises:
            RemoteEnvError: That has happened too often since an episode was finished.
        """
        row, cause = next(iter(discarded.items()))
        slot = state.slot
        lane = slot.lanes[row]
        self.first_failure = self.first_failure or f"lane {lane}: {cause}"
        key = NUM_EPISODES_INTERRUPTED_LIFETIME
        self.metrics.log_value(key, len(discarded), reduce="lifetime_sum")
        if not self._has_discarded:
            self._has_discarded = True
            _LOG.warning(
                "worker %s, lane %d: %s; its episode ends before that, as truncated, here and each "
                "time that this happens (metric %s)",
                self.worker_index,
                lane,
                cause,
                key,
            )
        if slot.retry.discarded(len(discarded)):
            num_discarded = slot.retry.num_discarded
            self._reset_retries(slot)
            have = "have" if len(slot.lanes) > 1 else "has"
            self.broken_environment = unusable_step(
                lane,
                f"{cause}; {_lanes_of(slot)} {have} lost {num_discarded} episodes that way since "
                "one last finished; mend the environment",
            )
            raise self.broken_environment

    @staticmethod
    def _reset_retries(slot: Slot) -> None:
        """Forget the failures of a slot that is given up: the next ``sample`` may go on with it."""
        slot.retry.succeeded()
        slot.retry.finished_episode()

    # --- moves ---------------------------------------------------------------------------

    def _move_sessions(self) -> None:
        """Have the sessions that are asked to move opened elsewhere, with new episodes.

        At the end of ``sample``, so that the last chunk of what is cut says so, and the new
        sessions are ready for the next call.
        """
        moving = self._assignments.sessions_to_move()
        for state in self._slots:
            leaving = moving.intersection(state.sessions)
            if leaving and state.slot.phase is not SlotPhase.OPENING:
                self._move(state, leaving)

    def _move(self, state: SlotState, leaving: frozenset[int]) -> None:
        slot = state.slot
        former = ", ".join(sorted({self._assignments.endpoint_of(number) for number in leaving}))
        if self._budget.num_episodes is None:  # else nobody goes on with what is running
            cause = f"the session goes on elsewhere, since it was to leave endpoint {former}"
            self._interrupt(slot, EndpointClosedError(cause))
        self.metrics.log_value(NUM_SESSIONS_MOVED_LIFETIME, len(leaving), reduce="lifetime_sum")
        _LOG.info(
            "worker %s, lanes %d to %d: %d session(s) leave endpoint %s for another one",
            self.worker_index,
            slot.lanes.start,
            slot.lanes.stop - 1,
            len(leaving),
            former,
        )
        self._assignments.drop(leaving)
        state.to_module = None
        state.shared_data = {}
        slot.reopen(0.0, in_background=True)


def _lanes_of(slot: Slot) -> str:
    first, last = slot.lanes.start, slot.lanes.stop - 1
    return f"lane {first}" if first == last else f"lanes {first} to {last}"


def _broken(error: RemoteEnvError, num_raised: int) -> RemoteEnvError:
    """Return the error of an environment that fails again and again."""
    return RemoteEnvError(
        error.code,
        f"{error.message}; this environment has failed {num_raised} times since it last finished "
        "an episode, and this is the last error; mend it (the endpoint's log has the traceback)",
        error.is_recoverable,
        error.debug_info,
        error.interrupted_episodes,
    )


class _EscapingError(BaseException):
    """Carries the error of a broken environment past what RLlib does for any Exception."""

    def __init__(self, error: RemoteEnvError) -> None:
        super().__init__(error)
        self.error = error


def _let_escape(func: Callable[..., Any]) -> Callable[..., Any]:
    def call(runner: SessionRecovery, *args: Any, **kwargs: Any) -> Any:
        try:
            return func(runner, *args, **kwargs)
        except RemoteEnvError as error:
            if error is runner.broken_environment:
                raise _EscapingError(error) from error
            raise

    return call


def raise_for_broken_environment(*, algorithm: Algorithm, result: dict[str, Any], **_: Any) -> None:
    """Raise why the runners have given up, if an iteration brought nothing; a callback of RLlib.

    RLlib logs what its runners raise, and asks them again for ever.

    Raises:
        RemoteEnvError: The environment fails again and again.
    """
    # Not a number where nothing has come since the last iteration.
    sampled = result.get(ENV_RUNNER_RESULTS, {}).get(NUM_ENV_STEPS_SAMPLED, 0)
    if sampled > 0 or algorithm.env_runner_group is None:
        return
    errors = algorithm.env_runner_group.foreach_env_runner(
        _broken_environment_of, local_env_runner=False, healthy_only=False, timeout_seconds=_ASK_S
    )
    for error in errors:
        if error is not None:
            raise error


def _broken_environment_of(runner: Any) -> RemoteEnvError | None:
    # Users may have set a class of their own after ``configure``.
    error: RemoteEnvError | None = getattr(runner, "broken_environment", None)
    return error
