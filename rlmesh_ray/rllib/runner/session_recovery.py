"""What a runner does about sessions that end early: those that fail, and those that move.

Either way their running episodes are truncated, and new sessions are opened.
"""

import logging
import time
from typing import TYPE_CHECKING, Any

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.env.env_runner import NUM_ENV_STEP_FAILURES_LIFETIME
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED

from rlmesh_ray.compat.rllib import forget_hanging
from rlmesh_ray.errors import EndpointClosedError, EndpointError, RemoteEnvError, RlmeshError
from rlmesh_ray.rllib.runner.slot import RetryPolicy, Slot, SlotPhase

if TYPE_CHECKING:
    from rlmesh_ray.rllib.runner.env_runner import SlotRunner

_LOG = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 10.0

INTERRUPTED_KEY = "rlmesh_ray.interrupted"
"""Key in the last info of an episode that a failure has truncated: the cause, as text."""

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


def truncate(episode: SingleAgentEpisode, cause: Exception | str) -> None:
    """End an episode at its last step, as truncated.

    A step that was in flight when the endpoint failed is no part of it.

    Args:
        episode: An episode that has been reset and is not done.
        cause: Goes into the last info, as text.
    """
    episode.is_truncated = True
    episode.infos.data[-1] = {**episode.infos.data[-1], INTERRUPTED_KEY: str(cause)}


def truncate_agents(episode: MultiAgentEpisode, cause: Exception | str) -> None:
    """End all agents of an episode that have not ended, as truncated.

    An agent that acted and was waiting for its next observation keeps the steps before: the result
    of that action is unknown.

    Args:
        episode: An episode that has been reset, is not done and is not converted to NumPy.
        cause: Goes into the last infos, as text.
    """
    episode.is_truncated = True
    for agent, own in episode.agent_episodes.items():
        if not own.is_done:
            truncate(own, cause)
            forget_hanging(episode, agent)


def reopen(runner: "SlotRunner", slot: Slot, error: Exception) -> None:
    """Truncate the episodes of a slot that has failed, and have its sessions opened again.

    Raises:
        Exception: ``error`` itself: another attempt is pointless, or it is a defect.
    """
    sampling = runner.sampling
    if not isinstance(error, RlmeshError):
        slot.reopen(0.0)
        raise error
    if slot.phase is not SlotPhase.OPENING:
        runner.metrics.log_value(NUM_ENV_STEP_FAILURES_LIFETIME, 1, reduce="lifetime_sum")
    slot.phase = SlotPhase.OPENING
    sampling.assignments.drop(slot.sessions)
    num_truncated = sampling.path.interrupt(slot, error)
    if num_truncated:
        key = NUM_EPISODES_INTERRUPTED_LIFETIME
        runner.metrics.log_value(key, num_truncated, reduce="lifetime_sum")
    others_work = any(other.phase is not SlotPhase.OPENING for other in sampling.slots)
    now_s = time.monotonic()
    delay_s = slot.retry.failed(error, now_s, others_work=others_work)
    num_raised = slot.retry.num_raised
    if delay_s is None:
        slot.retry = RetryPolicy()  # the next call of ``sample`` may continue with the slot
        slot.reopen(0.0)
        if isinstance(error, RemoteEnvError) and num_raised > 1:
            runner.broken_environment = _broken(error, num_raised)
            raise runner.broken_environment from error
        raise error
    runner.first_failure = runner.first_failure or f"{_lanes_of(slot)}: {error}"
    if isinstance(error, EndpointError):
        _report_absence(runner, slot, error, now_s, others_work=others_work)
    else:
        _LOG.warning(
            "worker %s, %s: %s; a new session is opened in %.2g s (failure %d)",
            runner.worker_index,
            _lanes_of(slot),
            error,
            delay_s,
            max(slot.retry.num_failures, num_raised),
        )
    slot.reopen(delay_s)


def _report_absence(
    runner: "SlotRunner", slot: Slot, error: EndpointError, now_s: float, *, others_work: bool
) -> None:
    absence = slot.retry.absence_to_report(now_s)
    if absence is None:
        return
    away_s, left_s = absence
    opened = f"{error}; a new session is opened"
    place = f" at {error.address}" if error.address else ""
    _LOG.warning(
        "worker %s, %s: %s; %s",
        runner.worker_index,
        _lanes_of(slot),
        f"no new session{place} for {away_s:.0f} s" if away_s >= 1.0 else opened,
        "other sessions sample" if others_work else f"the runner gives up in {left_s:.0f} s",
    )


def note_reopened(runner: "SlotRunner", slot: Slot) -> None:
    """Log that a slot has sessions again, at the level at which their loss is logged.

    Nothing is logged for sessions that were moved.
    """
    if not slot.retry.num_failures:
        return
    assignments = runner.sampling.assignments
    addresses = {assignments.get(each).address for each in slot.sessions}
    _LOG.warning(
        "worker %s, %s: a new session is open at %s, and sampling goes on",
        runner.worker_index,
        _lanes_of(slot),
        ", ".join(sorted(addresses)),
    )


def move_sessions(runner: "SlotRunner") -> None:
    """Have the sessions that are asked to move opened elsewhere, with new episodes.

    It is done at the end of ``sample``, so that the last chunk of each truncated episode is
    returned with the others, and the new sessions are ready for the next call.
    """
    sampling = runner.sampling
    moving = sampling.assignments.sessions_to_move()
    for slot in sampling.slots:
        leaving = moving.intersection(slot.sessions)
        if leaving and slot.phase is not SlotPhase.OPENING:
            _move(runner, slot, leaving)


def _move(runner: "SlotRunner", slot: Slot, leaving: frozenset[int]) -> None:
    sampling = runner.sampling
    former = ", ".join(sorted({sampling.assignments.endpoint_of(each) for each in leaving}))
    if sampling.call.num_episodes is None:  # else the next call resets the lanes anyway
        cause = f"the session was moved away from endpoint {former}"
        sampling.path.interrupt(slot, EndpointClosedError(cause))
    runner.metrics.log_value(NUM_SESSIONS_MOVED_LIFETIME, len(leaving), reduce="lifetime_sum")
    _LOG.info(
        "worker %s, %s: %d session(s) leave endpoint %s for another one",
        runner.worker_index,
        _lanes_of(slot),
        len(leaving),
        former,
    )
    sampling.assignments.drop(leaving)
    slot.reopen(0.0, in_background=True)


def _lanes_of(slot: Slot) -> str:
    first, last = slot.lanes.start, slot.lanes.stop - 1
    return f"lane {first}" if first == last else f"lanes {first} to {last}"


def _broken(error: RemoteEnvError, num_raised: int) -> RemoteEnvError:
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
        # The config may name another runner class, set after ``configure``.
        lambda runner: getattr(runner, "broken_environment", None),
        local_env_runner=False,
        healthy_only=False,
        timeout_seconds=_ASK_TIMEOUT_S,
    )
    for error in errors:
        if error is not None:
            raise error
