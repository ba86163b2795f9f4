"""Checks of "Episode Accounting"."""

import time
from collections.abc import Sequence

import numpy as np

from rlmesh_ray.compliance.checks import ClauseNotObservable, holds, require
from rlmesh_ray.compliance.env_subject import (
    ENV,
    MOST_STEPS,
    EnvSubject,
    RawEnvSession,
    ended_lanes,
)
from rlmesh_ray.compliance.probe import ProbeCommand
from rlmesh_ray.protocol.messages import EpisodeRecord, StepDone
from rlmesh_ray.spaces.contract import AutoresetMode
from rlmesh_ray.wire._pb.rlmesh.env.v1.interaction_pb2 import JoinResponse

_STEPS_AFTER_AN_END = 3


@holds(ENV, "episodes.begin")
def tracking_begins_at_reset_from_nothing(subject: EnvSubject) -> None:
    """Counts from before a Reset, in mid-episode or after an end, are dropped."""
    with subject.session() as session:
        session.reset()
        session.step_on()
        ids = session.reset().episode_ids
        records = session.close().final_episodes
    for record in records:
        _require_equal(record, "episode_id", record.episode_id, ids[record.env_index])
        _require_equal(record, "step_count", record.step_count, 0)
        _require_equal(record, "cumulative_reward", record.cumulative_reward, 0.0)
    with subject.session() as session:
        session.reset()
        session.until_episode_ends()
        session.reset()
        _require_sums(session, subject)


@holds(ENV, "episodes.accrue")
def every_step_adds_a_step_and_its_reward(subject: EnvSubject) -> None:
    """From Reset to the first end, compared with the responses of the steps."""
    with subject.session() as session:
        session.reset()
        _require_sums(session, subject)


@holds(ENV, "episodes.complete")
def an_end_is_reported_in_its_own_response(subject: EnvSubject) -> None:
    """The lanes with a flag are those with a record, up to the first end."""
    with subject.session() as session:
        session.reset()
        done = session.step()
        if not ended_lanes(done):
            _require_records_for_flags(done)
            done = session.until_episode_ends()
        _require_records_for_flags(done)


@holds(ENV, "episodes.metadata")
def a_record_describes_its_episode(subject: EnvSubject) -> None:
    """Id, lane, seed, cause and times; the last infos with the probe, for either cause."""
    seeds = tuple(range(40, 40 + subject.contract.num_envs))
    with subject.session() as session:
        ids = session.reset(seeds=seeds).episode_ids
        _check_records(session, subject, session.until_episode_ends(), ids, seeds)
        ids = session.reset().episode_ids
        _check_records(session, subject, session.until_episode_ends(), ids, ())
        if subject.is_probe:
            ids = session.reset(seeds=seeds).episode_ids
            _check_records(session, subject, session.obey(ProbeCommand.TRUNCATE), ids, seeds)


@holds(ENV, "episodes.once")
def a_record_is_delivered_once(subject: EnvSubject) -> None:
    """Not again in later steps, nor in the answer to Close."""
    with subject.session() as session:
        session.reset()
        records = list(session.until_episode_ends().completed_episodes)
        for _ in range(_STEPS_AFTER_AN_END if subject.may_step_after_end else 0):
            records += session.step().completed_episodes
        records += session.close().final_episodes
    ids = [record.episode_id for record in records]
    twice = sorted({one for one in ids if ids.count(one) > 1})
    require(not twice, f"records of episodes {twice} are delivered more than once")


@holds(ENV, "episodes.empty-id")
def the_id_of_an_ended_lane_is_empty(subject: EnvSubject) -> None:
    """From the step that ended it until the next Reset; the ids of other lanes stay."""
    with subject.session() as session:
        before = session.reset().episode_ids
        done = session.until_episode_ends()
        ended = ended_lanes(done)
        _require_ids(done.episode_ids, before, ended, "at its end")
        for _ in range(_STEPS_AFTER_AN_END if subject.may_step_after_end else 0):
            done = session.step()
            ended += ended_lanes(done)
            _require_ids(done.episode_ids, before, ended, "after it")
        again = session.reset().episode_ids
    require(all(again), f"after a Reset the ids are {list(again)}")


@holds(ENV, "episodes.no-restart")
def an_episode_that_an_autoreset_starts_is_not_tracked(subject: EnvSubject) -> None:
    """A second end in a lane without an explicit Reset has no record; after a Reset it has."""
    subject.probe()
    with subject.session() as session:
        first = session.reset().episode_ids
        session.obey(ProbeCommand.TERMINATE)
        session.obey()
        session.obey()
        second = session.obey(ProbeCommand.TRUNCATE)
        extra = [record for record in second.completed_episodes if record.env_index == 0]
        require(not extra, "an episode that no Reset began is completed")
        fresh = session.reset().episode_ids[0]
        require(fresh not in {"", first[0]}, f"after a Reset the id is {fresh!r}")
        third = session.obey(ProbeCommand.TERMINATE)
    records = [record.episode_id for record in third.completed_episodes]
    require(records == [fresh], f"after a Reset the records are of {records}, not {[fresh]}")


@holds(ENV, "episodes.autoreset")
def ended_lanes_go_on_as_the_contract_says(subject: EnvSubject) -> None:
    """NEXT_STEP: the step after the end starts an episode; DISABLED: the environment goes on."""
    mode = subject.probe().autoreset_mode
    if mode is AutoresetMode.SAME_STEP:
        raise ClauseNotObservable("the mode is SAME_STEP, which the edition reserves")
    with subject.session() as session:
        session.reset()
        session.obey()
        session.obey(ProbeCommand.TERMINATE)
        after = session.obey(box=np.array([0.5, 0.0], np.float32))
        steps = session.steps_of(after)[0]
    flags = bool(after.terminated[0] or after.truncated[0])
    require(not flags, "the step after an end reports an end again")
    if mode is AutoresetMode.NEXT_STEP:
        require(steps == 0, f"NEXT_STEP: after the end the lane is at step {steps}, not 0")
        require(after.rewards[0] == 0.0, "NEXT_STEP: the step that resets has a reward")
    else:
        require(steps == 3, f"DISABLED: after the end the lane is at step {steps}, not 3")


def _require_sums(session: RawEnvSession, subject: EnvSubject) -> None:
    """Step to the first end; require that its records count these steps and rewards."""
    totals = np.zeros(subject.contract.num_envs)
    sizes = np.zeros(subject.contract.num_envs)
    for count in range(1, MOST_STEPS + 1):
        done = _step_towards_end(session, subject, count)
        totals += done.rewards
        sizes += np.abs(done.rewards)
        if ended_lanes(done):
            break
    _require_records_for_flags(done)
    for record in done.completed_episodes:
        _require_equal(record, "step_count", record.step_count, count)
        lane, found = record.env_index, record.cumulative_reward
        is_close = np.isclose(found, totals[lane], rtol=0, atol=1e-6 * sizes[lane], equal_nan=True)
        message = f"lane {lane}: cumulative_reward is {found}, the rewards add up to {totals[lane]}"
        require(bool(is_close), message)


def _step_towards_end(session: RawEnvSession, subject: EnvSubject, count: int) -> StepDone:
    if subject.is_probe:
        box = np.array([0.25 * count, 0.0], np.float32)
        return session.obey(ProbeCommand.TERMINATE if count == 3 else ProbeCommand.GO_ON, box=box)
    if subject.is_endless or count == MOST_STEPS:
        raise ClauseNotObservable(f"no episode has ended within {MOST_STEPS} steps")
    return session.step()


def _check_records(
    session: RawEnvSession,
    subject: EnvSubject,
    done: StepDone,
    ids: Sequence[str],
    seeds: Sequence[int],
) -> None:
    messages = JoinResponse.FromString(session.last_frame).step.completed_episodes
    for record, message in zip(done.completed_episodes, messages, strict=True):
        lane = record.env_index
        _require_equal(record, "episode_id", record.episode_id, ids[lane])
        _require_equal(record, "seed", record.seed, seeds[lane] if seeds else None)
        _require_equal(record, "terminated", record.terminated, bool(done.terminated[lane]))
        _require_equal(record, "truncated", record.truncated, bool(done.truncated[lane]))
        now_ns, hour_ns = time.time_ns(), 3_600_000_000_000  # clocks may differ
        start_ns, end_ns = record.start_timestamp_ns, record.end_timestamp_ns
        is_possible = now_ns - hour_ns < start_ns <= end_ns < now_ns + hour_ns
        require(is_possible, f"lane {lane}: its times, {start_ns} to {end_ns}, are impossible")
        duration_ms = (end_ns - start_ns) / 1_000_000
        is_right = abs(message.duration_ms - duration_ms) <= 1
        require(is_right, f"lane {lane}: duration_ms is {message.duration_ms}, not {duration_ms}")
        if subject.is_probe:
            steps = record.final_info.get("steps")
            require(steps == 1, f"lane {lane}: final_info has steps {steps!r}, not 1")


def _require_ids(ids: Sequence[str], before: Sequence[str], ended: list[int], when: str) -> None:
    expected = ["" if lane in ended else one for lane, one in enumerate(before)]
    require(list(ids) == expected, f"the ids {when} are {list(ids)}, expected {expected}")


def _require_records_for_flags(done: StepDone) -> None:
    lanes = sorted(record.env_index for record in done.completed_episodes)
    ended = ended_lanes(done)
    require(lanes == ended, f"lanes {ended} have ended, completed_episodes has {lanes}")


def _require_equal(record: EpisodeRecord, name: str, found: object, expected: object) -> None:
    lane = record.env_index
    require(found == expected, f"lane {lane}: {name} is {found!r}, expected {expected!r}")
