"""What a runner does about sessions that end early: those that fail, and those that move.

Either way their running episodes are truncated, and new sessions are opened.
"""

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.env.env_runner import NUM_ENV_STEP_FAILURES_LIFETIME
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED

from rlmesh_ray.errors import EndpointClosedError, EndpointError, RemoteEnvError, RlmeshError
from rlmesh_ray.rllib.runner.autoreset_emulation import unusable_step
from rlmesh_ray.rllib.runner.slot import Slot, SlotPhase
from rlmesh_ray.rllib.runner.slot_state import SlotState

if TYPE_CHECKING:
    from rlmesh_ray.rllib.runner.slot_runner import SlotRunner

_LOG = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 10.0

NUM_EPISODES_INTERRUPTED_LIFETIME = "num_episodes_interrupted_lifetime"
"""Metric: episodes that a failure has truncated."""
NUM_SESSIONS_MOVED_LIFETIME = "num_sessions_moved"
"""Metric: sessions that were moved to another endpoint at the registry's request."""
LIFETIME_SUMS = (
    NUM_ENV_STEP_FAILURES_LIFETIME,
    NUM_EPISODES_INTERRUPTED_LIFETIME,
    NUM_SESSIONS_MOVED_LIFETIME,
)
"""The metrics that this module counts."""


class SessionRecovery:
    """Reopens the sessions that a runner has lost, and those that the registry asks to move.

    Args:
        runner: The runner; its ``first_failure`` and ``broken_environment`` are set here.
    """

    def __init__(self, runner: "SlotRunner") -> None:
        self._runner = runner
        self._has_discarded = False

    # --- failures ------------------------------------------------------------------------

    def reopen(self, state: SlotState, error: Exception) -> None:
        """Truncate the episodes of a slot that has failed, and have its sessions opened again.

        Raises:
            Exception: ``error`` itself: another attempt is pointless, or it is a defect.
        """
        slot, runner = state.slot, self._runner
        if not isinstance(error, RlmeshError):
            slot.reopen(0.0)
            raise error
        if slot.phase is not SlotPhase.OPENING:
            runner.metrics.log_value(NUM_ENV_STEP_FAILURES_LIFETIME, 1, reduce="lifetime_sum")
        slot.phase = SlotPhase.OPENING
        runner._assignments.drop(state.sessions)
        num_truncated = runner._path.interrupt(slot, error)
        if num_truncated:
            key = NUM_EPISODES_INTERRUPTED_LIFETIME
            runner.metrics.log_value(key, num_truncated, reduce="lifetime_sum")
        others_work = any(other.slot.phase is not SlotPhase.OPENING for other in runner._slots)
        now_s = time.monotonic()
        delay_s = slot.retry.failed(error, now_s, others_work=others_work)
        num_raised = slot.retry.num_env_failures
        if delay_s is None:
            self._reset_retries(slot)
            slot.reopen(0.0)
            if isinstance(error, RemoteEnvError) and num_raised > 1:
                runner.broken_environment = _broken(error, num_raised)
                raise runner.broken_environment from error
            raise error
        runner.first_failure = runner.first_failure or f"{_lanes_of(slot)}: {error}"
        if isinstance(error, EndpointError):
            self._report_absence(slot, error, now_s, others_work=others_work)
        else:
            _LOG.warning(
                "worker %s, %s: %s; a new session is opened in %.2g s (failure %d)",
                runner.worker_index,
                _lanes_of(slot),
                error,
                delay_s,
                max(slot.retry.num_failures, num_raised),
            )
        state.to_module = None
        state.shared_data = {}
        slot.reopen(delay_s)

    def _report_absence(
        self, slot: Slot, error: EndpointError, now_s: float, *, others_work: bool
    ) -> None:
        absence = slot.retry.absence_to_report(now_s)
        if absence is None:
            return
        away_s, left_s = absence
        opened = f"{error}; a new session is opened"
        place = f" at {error.address}" if error.address else ""
        _LOG.warning(
            "worker %s, %s: %s; %s",
            self._runner.worker_index,
            _lanes_of(slot),
            f"no new session{place} for {away_s:.0f} s" if away_s >= 1.0 else opened,
            "other sessions sample" if others_work else f"the runner gives up in {left_s:.0f} s",
        )

    def note_reopened(self, state: SlotState) -> None:
        """Log that a slot has sessions again, at the level at which their loss is logged.

        Nothing is logged for sessions that were moved.
        """
        if not state.slot.retry.num_failures:
            return
        addresses = {self._runner._assignments.address_of(each) for each in state.sessions}
        _LOG.warning(
            "worker %s, %s: a new session is open at %s, and sampling goes on",
            self._runner.worker_index,
            _lanes_of(state.slot),
            ", ".join(sorted(addresses)),
        )

    # --- steps that cannot be used ----------------------------------------------------------

    def count_discarded(self, state: SlotState, discarded: Mapping[int, str]) -> None:
        """Count episodes that were truncated before a step which must not reach a learner.

        Args:
            state: The slot.
            discarded: The cause for each of its lanes where that has happened.

        Raises:
            RemoteEnvError: That has happened too often since an episode was finished.
        """
        runner = self._runner
        row, cause = next(iter(discarded.items()))
        slot = state.slot
        lane = slot.lanes[row]
        runner.first_failure = runner.first_failure or f"lane {lane}: {cause}"
        key = NUM_EPISODES_INTERRUPTED_LIFETIME
        runner.metrics.log_value(key, len(discarded), reduce="lifetime_sum")
        if not self._has_discarded:
            self._has_discarded = True
            _LOG.warning(
                "worker %s, lane %d: %s; its episode ends before that step, as truncated, now and "
                "each time that this happens (metric %s)",
                runner.worker_index,
                lane,
                cause,
                key,
            )
        if slot.retry.discarded(len(discarded)):
            num_discarded = slot.retry.num_discarded
            self._reset_retries(slot)
            have = "have" if len(slot.lanes) > 1 else "has"
            runner.broken_environment = unusable_step(
                lane,
                f"{cause}; {_lanes_of(slot)} {have} lost {num_discarded} episodes that way since "
                "one last finished; repair the environment",
            )
            raise runner.broken_environment

    @staticmethod
    def _reset_retries(slot: Slot) -> None:
        """Forget the failures of a slot that is given up: the next ``sample`` may go on with it."""
        slot.retry.succeeded()
        slot.retry.finished_episode()

    # --- moves ---------------------------------------------------------------------------

    def move_sessions(self) -> None:
        """Have the sessions that are asked to move opened elsewhere, with new episodes.

        It is done at the end of ``sample``, so that the last chunk of each truncated episode is
        returned with the others, and the new sessions are ready for the next call.
        """
        moving = self._runner._assignments.sessions_to_move()
        for state in self._runner._slots:
            leaving = moving.intersection(state.sessions)
            if leaving and state.slot.phase is not SlotPhase.OPENING:
                self._move(state, leaving)

    def _move(self, state: SlotState, leaving: frozenset[int]) -> None:
        slot, runner = state.slot, self._runner
        former = ", ".join(sorted({runner._assignments.endpoint_of(each) for each in leaving}))
        if runner._call.budget.num_episodes is None:  # else the next call resets the lanes anyway
            cause = f"the session was moved away from endpoint {former}"
            runner._path.interrupt(slot, EndpointClosedError(cause))
        runner.metrics.log_value(NUM_SESSIONS_MOVED_LIFETIME, len(leaving), reduce="lifetime_sum")
        _LOG.info(
            "worker %s, %s: %d session(s) leave endpoint %s for another one",
            runner.worker_index,
            _lanes_of(slot),
            len(leaving),
            former,
        )
        runner._assignments.drop(leaving)
        state.to_module = None
        state.shared_data = {}
        slot.reopen(0.0, in_background=True)


def _lanes_of(slot: Slot) -> str:
    first, last = slot.lanes.start, slot.lanes.stop - 1
    return f"lane {first}" if first == last else f"lanes {first} to {last}"


def _broken(error: RemoteEnvError, num_raised: int) -> RemoteEnvError:
    """Return the error of an environment that fails again and again."""
    # A timeout names its own remedy.
    is_late = error.code == "TIMEOUT"
    remedy = "" if is_late else "; repair it (the endpoint's log has the traceback)"
    return RemoteEnvError(
        error.code,
        f"{error.message}; this environment has failed {num_raised} times since it last finished "
        f"an episode, and this is the last error{remedy}",
        error.is_recoverable,
        error.debug_info,
        error.interrupted_episodes,
    )


def raise_for_broken_environment(*, algorithm: Algorithm, result: dict[str, Any], **_: Any) -> None:
    """Raise the runners' error if an iteration brought no steps: a callback of RLlib.

    RLlib itself logs what its runners raise, and calls ``sample`` again without end.

    Raises:
        RemoteEnvError: The environment fails again and again.
        ConfigurationError: The module had to be compiled, and cannot be.
    """
    # NaN where no steps have arrived since the last iteration.
    sampled = result.get(ENV_RUNNER_RESULTS, {}).get(NUM_ENV_STEPS_SAMPLED, 0)
    if sampled > 0 or algorithm.env_runner_group is None:
        return
    errors = algorithm.env_runner_group.foreach_env_runner(
        _broken_environment_of,
        local_env_runner=False,
        healthy_only=False,
        timeout_seconds=_ASK_TIMEOUT_S,
    )
    for error in errors:
        if error is not None:
            raise error


def _broken_environment_of(runner: Any) -> RlmeshError | None:
    # The config may name another runner class, set after ``configure``.
    error: RlmeshError | None = getattr(runner, "broken_environment", None)
    return error
