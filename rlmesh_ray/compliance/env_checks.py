"""Checks of an EnvService: order, lanes, episodes, errors, and the conformance of values."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import numpy as np

from rlmesh_ray.client.env.remote_env import decode_png
from rlmesh_ray.compliance import action_cases
from rlmesh_ray.compliance.action_cases import packed
from rlmesh_ray.compliance.checks import ClauseBroken, ClauseNotObservable, holds, require
from rlmesh_ray.compliance.probe import SLEEP_S, ProbeCommand
from rlmesh_ray.compliance.subjects import (
    MOST_STEPS,
    EnvSubject,
    RawEnvSession,
    ended_lanes,
    expect,
    is_same,
    require_one_response_each,
)
from rlmesh_ray.errors import EndpointLostError
from rlmesh_ray.protocol.messages import (
    Close,
    Closed,
    EnvErrorCode,
    EnvFailed,
    EnvResponse,
    EpisodeRecord,
    Render,
    Rendered,
    Reset,
    ResetDone,
    Step,
    StepDone,
)
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.spec import BoxSpec, MultiBinarySpec, MultiDiscreteSpec
from rlmesh_ray.spaces.validation import WARNING_KEY, ValidationMode
from rlmesh_ray.wire._pb.rlmesh.env.v1.interaction_pb2 import JoinResponse

_PIPELINED_STEPS = 40


@holds("ordering.arrival")
def responses_come_in_the_order_of_arrival(subject: EnvSubject) -> None:
    sent, received = _pipelined(subject)
    first_seen = list(dict.fromkeys(received))
    expected = [request_id for request_id in sent if request_id in first_seen]
    require(first_seen == expected, f"responses came in the order {first_seen}")


@holds("ordering.one-response")
def every_request_has_one_response(subject: EnvSubject) -> None:
    sent, received = _pipelined(subject)
    require_one_response_each(sent, received)


@holds("ordering.in-band")
def a_request_that_fails_is_answered_in_band(subject: EnvSubject) -> None:
    lanes = subject.contract.num_envs
    wrong = packed(subject.contract) + b"\xff"
    requests: list[tuple[Reset | Step, str]] = [
        (Reset("1", seeds=(1,) * (lanes + 1)), "with one seed too many"),
        (Reset("1", env_indices=(lanes,)), "of a lane that does not exist"),
        (Reset("1", env_indices=(-1,)), "of lane -1"),
        (Step("1", wrong), "with an action of the wrong size"),
    ]
    for request, why in requests:
        with subject.after_reset() as session:
            session.refused(request, why)


@holds("vector.width")
def the_vector_is_as_wide_as_the_contract_says(subject: EnvSubject) -> None:
    lanes = subject.contract.num_envs
    require(lanes >= 1, f"the contract has num_envs = {lanes}")
    with subject.session() as session:
        ids = session.reset().episode_ids
    require(len(ids) == lanes, f"num_envs is {lanes}, but Reset gives {len(ids)} episode ids")


@holds("vector.batches")
def values_are_batches_over_all_lanes(subject: EnvSubject) -> None:
    contract = subject.contract
    with subject.session() as session:
        session.observation(session.reset().observation)
        session.observation(session.step().observation)
    for width in {contract.num_envs + 1, contract.num_envs - 1}:
        action = packed(contract, num_lanes=width)
        if action == packed(contract):
            raise ClauseNotObservable("actions have no bytes")
        subject.refused(action, f"with actions for {width} lanes")


@holds("vector.entries")
def rewards_and_masks_have_one_entry_per_lane(subject: EnvSubject) -> None:
    """In every response up to the one that ends an episode; ``step`` counts them."""
    with subject.after_reset() as session:
        if not ended_lanes(session.step()):
            session.until_episode_ends()


@holds("vector.index-order")
def entries_are_in_the_order_of_the_lanes(subject: EnvSubject) -> None:
    lanes = subject.probe().num_envs
    if lanes < 2:
        raise ClauseNotObservable("needs more than one lane")
    idle = [ProbeCommand.GO_ON] * (lanes - 1)
    with subject.after_reset() as session:
        done = session.obey(*idle, ProbeCommand.TERMINATE)
        cut = session.obey(ProbeCommand.TRUNCATE)
    require(_set(done.terminated) == [lanes - 1], f"lane {lanes - 1} ended: {done.terminated!r}")
    require(_set(cut.truncated) == [0], f"lane 0 was truncated: {cut.truncated!r}")
    ended = [episode.env_index for episode in (*done.completed_episodes, *cut.completed_episodes)]
    require(ended == [lanes - 1, 0], f"records are for lanes {ended}, not {[lanes - 1, 0]}")


@holds("reset.all-lanes")
def reset_starts_all_lanes(subject: EnvSubject) -> None:
    seeds = tuple(range(7, 7 + subject.contract.num_envs))
    with subject.session() as session:
        first = session.reset(seeds=seeds)
        session.step()
        again = session.reset(seeds=seeds)
        start = session.observation(first.observation)
        restart = session.observation(again.observation)
    kept = set(first.episode_ids) & set(again.episode_ids)
    require(not kept, f"a Reset in mid-episode keeps the ids {sorted(kept)}")
    is_back = is_same(start, restart) or not subject.is_probe
    require(is_back, "a Reset in mid-episode with the same seeds starts elsewhere")


@holds("reset.first")
def a_step_before_the_first_reset_is_refused(subject: EnvSubject) -> None:
    with subject.session() as session:
        error = session.refused(session.step_request(), "before the first Reset")
        require(error.code is EnvErrorCode.NOT_READY, f"its code is {error.code.name}")
        require(error.is_recoverable, "it is non-recoverable")
        session.reset()
        session.step()


@holds("reset.seeds")
def a_reset_has_no_seeds_or_one_per_lane(subject: EnvSubject) -> None:
    lanes = subject.contract.num_envs
    seeds = tuple(range(7, 7 + lanes))
    with subject.after_reset() as session:
        start = session.observation(session.reset(seeds=seeds).observation)
        mirrored = session.observation(session.reset(seeds=seeds[::-1]).observation)
    if subject.is_probe:
        is_mirrored = is_same(start, [column[::-1] for column in mirrored])
        require(is_mirrored, "the same seeds in another order do not give the same lanes in it")
    for count in {lanes + 1, lanes - 1} - {0}:
        with subject.session() as session:
            request = Reset(session.new_id(), seeds=tuple(range(count)))
            session.refused(request, f"with {count} seeds for {lanes} lanes")


@holds("reset.response")
def reset_gives_observations_and_ids(subject: EnvSubject) -> None:
    with subject.session() as session:
        done = session.reset()
        session.observation(done.observation)
    ids = done.episode_ids
    require(all(ids), f"episode ids are empty: {list(ids)}")
    require(len(set(ids)) == len(ids), f"lanes share an episode id: {list(ids)}")


@holds("step.all-lanes")
def a_step_is_one_step_of_each_lane(subject: EnvSubject) -> None:
    with subject.after_reset() as session:
        done = session.step_on()
        if subject.is_probe:
            steps = session.steps_of(done)
            require(set(steps) == {1}, f"after one Step the lanes have done {steps} steps")
        records = session.close().final_episodes
    if not records:
        raise ClauseNotObservable("Close reports no episodes")
    counts = {record.env_index: record.step_count for record in records}
    expected = dict.fromkeys(range(subject.contract.num_envs), 1)
    require(counts == expected, f"after one Step the lanes have done {counts} steps")


@holds("step.response")
def a_step_gives_all_of_its_results(subject: EnvSubject) -> None:
    with subject.session() as session:
        ids = session.reset().episode_ids
        done = session.step_on()
        session.observation(done.observation)
    require(done.episode_ids == ids, f"ids have changed from {ids} to {done.episode_ids}")
    if subject.is_probe:
        require("steps" in done.infos, f"the infos have only {sorted(done.infos)}")


@holds("wire.unreadable")
def a_frame_that_is_not_a_request_is_answered_in_band(subject: EnvSubject) -> None:
    with subject.after_reset() as session:
        session.send_frame(b"")
        expect(session.receive(), EnvFailed, "the frame b''")
    with subject.after_reset() as session:
        frame = b"\xff\xff\xff\xff"
        session.send_frame(frame)
        # In many servers gRPC decodes, and ends the stream with a status.
        with suppress(EndpointLostError):
            expect(session.receive(), EnvFailed, f"the frame {frame!r}")


@holds("wire.bare-join")
def a_join_without_a_session_id_is_served(subject: EnvSubject) -> None:
    """By its first message: clients of other implementations have no session id."""
    with subject.session(is_bare=True) as session:
        session.reset()
        session.step()


@holds("wire.partial-reset")
def env_indices_restart_only_those_lanes(subject: EnvSubject) -> None:
    lanes = subject.contract.num_envs
    if lanes < 2:
        raise ClauseNotObservable("needs more than one lane")
    with subject.session() as session:
        before = session.reset().episode_ids
        moved = session.step()
        request = Reset(session.new_id(), env_indices=(lanes - 1,))
        response = session.ask(request)
        if isinstance(response, EnvFailed):
            raise ClauseNotObservable(f"the server refuses it: {response.message}")
        done = expect(response, ResetDone, "Reset")
        ids = done.episode_ids
        kept = session.observation(done.observation)
        old = session.observation(moved.observation)
        records = session.close().final_episodes
    others, fresh = ids[: lanes - 1], "".join(ids[lanes - 1 : lanes])
    is_same_id = others == moved.episode_ids[: lanes - 1]
    require(is_same_id, f"lanes that were not named have new ids: {others}")
    require(bool(fresh), "the lane that was named has no id")
    require(fresh not in before, f"the lane that was named keeps its id {fresh}")
    for one, other in zip(kept, old, strict=True):
        is_kept = np.array_equal(one[: lanes - 1], other[: lanes - 1])
        require(is_kept, "lanes that were not named have moved")
    for record in records:
        lane, found, expected = (
            record.env_index,
            record.step_count,
            int(record.env_index < lanes - 1),
        )
        require(found == expected, f"lane {lane} has {found} steps at the end, not {expected}")


@holds("wire.step-lanes")
def env_indices_of_a_step_are_refused(subject: EnvSubject) -> None:
    """The field is reserved: a Step steps all lanes or none."""
    with subject.after_reset() as session:
        request = Step(session.new_id(), packed(subject.contract), env_indices=(0,))
        session.refused(request, "of some lanes")


@holds("render.frame")
def render_gives_a_frame_where_the_mode_has_one(subject: EnvSubject) -> None:
    mode = subject.contract.render_mode
    with subject.after_reset() as session:
        response = session.ask(Render(session.new_id()))
    if not isinstance(response, Rendered):
        raise ClauseBroken(f"Render is answered with {type(response).__name__}")
    if mode == "rgb_array":
        require(response.png is not None, "the mode is rgb_array, but there is no frame")
        try:
            decode_png(response.png or b"")
        except (OSError, SyntaxError, ValueError) as error:  # as Pillow reports it
            raise ClauseBroken(f"the frame is not a PNG: {error}") from error
    elif mode:
        raise ClauseNotObservable(f"what mode {mode!r} draws is not known here")
    else:
        require(response.png is None, "there is a frame without a render mode")


def _pipelined(subject: EnvSubject) -> tuple[list[str], list[str]]:
    """Send a whole session without waiting; return the sent ids, and those of all responses."""
    with subject.session() as session:
        requests: list[Reset | Step | Render | Close] = [session.step_request()]
        for number in range(_PIPELINED_STEPS):
            if number % 10 == 0:
                requests.append(Reset(session.new_id()))
            if number % 7 == 0:
                requests.append(Render(session.new_id()))
                requests.append(Reset(session.new_id(), env_indices=(subject.contract.num_envs,)))
            requests.append(session.step_request())
        requests.append(Close(session.new_id()))
        session.send(*requests)
        responses = session.until_end()
    return [each.request_id for each in requests], [each.request_id for each in responses]


def _set(mask: bytes) -> list[int]:
    return [lane for lane, flag in enumerate(mask) if flag]


_TIMEOUT_MS = 300
# Well before the environment wakes; a busy machine answers late.
_LATE_S = 0.9
"""Longest time from the deadline to its response, network included."""


@holds("close.answer")
def close_reports_the_running_episodes(subject: EnvSubject) -> None:
    seeds = tuple(range(40, 40 + subject.contract.num_envs))
    with subject.session() as session:
        ids = session.reset(seeds=seeds).episode_ids
        rewards = session.step_on().rewards
        records = session.close().final_episodes
    found = sorted(record.episode_id for record in records)
    require(found == sorted(ids), f"Close reports episodes {found}, running were {sorted(ids)}")
    for record in records:
        lane = record.env_index
        facts = (record.terminated, record.truncated, record.seed, record.step_count)
        expected = (False, False, seeds[lane], 1)
        require(facts == expected, f"lane {lane}: end, seed and steps are {facts}, not {expected}")
        is_sum = np.isclose(record.cumulative_reward, rewards[lane], equal_nan=True)
        require(bool(is_sum), f"lane {lane}: cumulative_reward is {record.cumulative_reward}")


@holds("close.end")
def the_stream_ends_after_close(subject: EnvSubject) -> None:
    with subject.after_reset() as session:
        session.send(Close("last"), Reset("behind"), Close("far behind"))
        try:
            responses = session.until_end()
        except EndpointLostError as error:
            raise ClauseBroken(
                f"after Close the stream breaks instead of ending: {error}"
            ) from error
    closed = [response.request_id for response in responses if isinstance(response, Closed)]
    require(closed == ["last"], f"responses to Close came for {closed}")
    require(len(responses) == 1, f"{len(responses) - 1} responses came after that to Close")


@holds("timeout.in-band")
def a_deadline_that_passes_is_answered_in_band(subject: EnvSubject) -> None:
    with subject.probe_after_reset() as session:
        start_s = time.monotonic()
        session.ask(Render(session.new_id()))
        round_trip_s = time.monotonic() - start_s
        step = Step(session.new_id(), subject.command(ProbeCommand.SLEEP), _TIMEOUT_MS)
        if not _require_timeout(session, step, round_trip_s):
            return
        fresh = session.steps_of(session.reset())
        require(set(fresh) == {0}, f"after TIMEOUT and Reset the lanes are at steps {fresh}")
        done = session.obey(box=np.array([0.5, 0.0], np.float32))
        steps = session.steps_of(done)
        is_own = set(steps) == {1} and set(done.rewards) == {0.5}
        require(is_own, "the first Step after TIMEOUT and Reset has an older one's result")
    with subject.session() as session:
        reset = session.command_reset(ProbeCommand.SLEEP, timeout_ms=_TIMEOUT_MS)
        _require_timeout(session, reset, round_trip_s)


def _require_timeout(session: RawEnvSession, request: Step | Reset, round_trip_s: float) -> bool:
    start_s = time.monotonic()
    error = session.refused(request, f"of {SLEEP_S:g} s within {_TIMEOUT_MS} ms")
    waited_s = time.monotonic() - start_s
    require(error.code is EnvErrorCode.TIMEOUT, f"its code is {error.code.name}")
    require(
        waited_s <= _TIMEOUT_MS / 1000 + _LATE_S + 2 * round_trip_s,
        f"the answer to timeout_ms={_TIMEOUT_MS} came after {waited_s * 1000:.0f} ms",
    )
    return error.is_recoverable


@holds("errors.interrupted")
def episodes_that_an_error_ends_are_reported(subject: EnvSubject) -> None:
    subject.probe()
    with subject.session() as session:
        ids = session.reset().episode_ids
        session.obey()
        error = _failed(session)
        found = sorted(record.episode_id for record in error.interrupted_episodes)
        require(
            found == sorted(ids), f"interrupted_episodes are {found}, running were {sorted(ids)}"
        )
        for record in error.interrupted_episodes:
            facts = (record.terminated, record.truncated, record.step_count)
            require(facts == (False, False, 1), f"lane {record.env_index}: {facts}")
        session.reset()
        again = {record.episode_id for record in session.close().final_episodes}
    require(not again & set(ids), f"Close reports interrupted episodes again: {again & set(ids)}")


@holds("errors.content")
def an_error_has_a_code_and_a_message(subject: EnvSubject) -> None:
    with subject.session() as session:
        errors = [session.refused(session.step_request(), "before the first Reset")]
        if subject.is_probe:
            session.reset()
            errors.append(_failed(session))
    for error in errors:
        require(error.code is not EnvErrorCode.UNSPECIFIED, f"no code: {error.message!r}")
        require(bool(error.message), f"no message with {error.code.name}")


@holds("errors.recoverable")
def a_session_continues_after_a_recoverable_error(subject: EnvSubject) -> None:
    lanes = subject.contract.num_envs
    with subject.after_reset() as session:
        request = Reset(session.new_id(), seeds=(1,) * (lanes + 1))
        if session.refused(request, "with one seed too many").is_recoverable:
            session.step()
        if subject.is_probe:
            is_recoverable = _failed(session).is_recoverable
            require(is_recoverable, "an environment that raises is non-recoverable")
            session.reset()
            session.step()


def _failed(session: RawEnvSession) -> EnvFailed:
    request = session.step_request(session.subject.command(ProbeCommand.FAIL))
    return session.refused(request, "of an environment that raises")


_STEPS_AFTER_AN_END = 3


@holds("episodes.begin")
def tracking_begins_at_reset_from_nothing(subject: EnvSubject) -> None:
    with subject.after_reset() as session:
        session.step_on()
        ids = session.reset().episode_ids
        records = session.close().final_episodes
    for record in records:
        _require_equal(record, "episode_id", record.episode_id, ids[record.env_index])
        _require_equal(record, "step_count", record.step_count, 0)
        _require_equal(record, "cumulative_reward", record.cumulative_reward, 0.0)
    with subject.after_reset() as session:
        session.until_episode_ends()
        session.reset()
        _require_sums(session)


@holds("episodes.accrue")
def every_step_adds_a_step_and_its_reward(subject: EnvSubject) -> None:
    with subject.after_reset() as session:
        _require_sums(session)


@holds("episodes.complete")
def an_end_is_reported_in_its_own_response(subject: EnvSubject) -> None:
    with subject.after_reset() as session:
        done = session.step()
        if not ended_lanes(done):
            _require_records_for_flags(done)
            done = session.until_episode_ends()
        _require_records_for_flags(done)


@holds("episodes.metadata")
def a_record_describes_its_episode(subject: EnvSubject) -> None:
    seeds = tuple(range(40, 40 + subject.contract.num_envs))
    with subject.session() as session:
        ids = session.reset(seeds=seeds).episode_ids
        _check_records(session, session.until_episode_ends(), ids, seeds)
        ids = session.reset().episode_ids
        _check_records(session, session.until_episode_ends(), ids, ())
        if subject.is_probe:
            ids = session.reset(seeds=seeds).episode_ids
            _check_records(session, session.obey(ProbeCommand.TRUNCATE), ids, seeds)


@holds("episodes.once")
def a_record_is_delivered_once(subject: EnvSubject) -> None:
    with subject.after_reset() as session:
        records = list(session.until_episode_ends().completed_episodes)
        for done in _steps_after_end(session):
            records += done.completed_episodes
        records += session.close().final_episodes
    ids = [record.episode_id for record in records]
    twice = sorted({one for one in ids if ids.count(one) > 1})
    require(not twice, f"records of episodes {twice} are delivered more than once")


@holds("episodes.empty-id")
def the_id_of_an_ended_lane_is_empty(subject: EnvSubject) -> None:
    with subject.session() as session:
        before = session.reset().episode_ids
        done = session.until_episode_ends()
        ended = ended_lanes(done)
        _require_ids(done.episode_ids, before, ended, "at its end")
        for done in _steps_after_end(session):
            ended += ended_lanes(done)
            _require_ids(done.episode_ids, before, ended, "after it")
        again = session.reset().episode_ids
    require(all(again), f"after a Reset the ids are {list(again)}")


@holds("episodes.no-restart")
def an_episode_that_an_autoreset_starts_is_not_tracked(subject: EnvSubject) -> None:
    subject.probe()
    with subject.session() as session:
        first = session.reset().episode_ids
        session.obey(ProbeCommand.TERMINATE)
        session.obey()
        session.obey()
        second = session.obey(ProbeCommand.TRUNCATE)
        extra = [record for record in second.completed_episodes if record.env_index == 0]
        require(not extra, "an episode that no Reset began has a record")
        fresh = session.reset().episode_ids[0]
        require(fresh not in {"", first[0]}, f"after a Reset the id is {fresh!r}")
        third = session.obey(ProbeCommand.TERMINATE)
    records = [record.episode_id for record in third.completed_episodes]
    require(records == [fresh], f"after a Reset the records are of {records}, not {[fresh]}")


@holds("episodes.autoreset")
def ended_lanes_continue_as_the_contract_says(subject: EnvSubject) -> None:
    mode = subject.probe().autoreset_mode
    if mode is AutoresetMode.SAME_STEP:
        raise ClauseNotObservable("the mode is SAME_STEP, which the edition reserves")
    with subject.after_reset() as session:
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


def _steps_after_end(session: RawEnvSession) -> list[StepDone]:
    count = _STEPS_AFTER_AN_END if session.subject.may_step_after_end else 0
    return [session.step() for _ in range(count)]


def _require_sums(session: RawEnvSession) -> None:
    """Step to the first end; require that its records count these steps and rewards."""
    totals, sizes = np.zeros((2, session.subject.contract.num_envs))
    for count in range(1, MOST_STEPS + 1):
        done = _step_towards_end(session, count)
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


def _step_towards_end(session: RawEnvSession, count: int) -> StepDone:
    subject = session.subject
    if subject.is_probe:
        box = np.array([0.25 * count, 0.0], np.float32)
        return session.obey(ProbeCommand.TERMINATE if count == 3 else ProbeCommand.GO_ON, box=box)
    if subject.is_endless or count == MOST_STEPS:
        raise ClauseNotObservable(f"no episode has ended within {MOST_STEPS} steps")
    return session.step()


def _check_records(
    session: RawEnvSession, done: StepDone, ids: Sequence[str], seeds: Sequence[int]
) -> None:
    sent = JoinResponse.FromString(session.last_frame).step.completed_episodes
    for record, message in zip(done.completed_episodes, sent, strict=True):
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
        if session.subject.is_probe:
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


_WRONG_OBSERVATIONS = (
    ProbeCommand.OBSERVE_NAN,
    ProbeCommand.OBSERVE_WRONG_SHAPE,
    ProbeCommand.OBSERVE_MISSING_KEY,
)


def _resized(kind: type) -> Callable[[EnvContract], list[bytes]]:
    return partial(action_cases.resized, kind=kind)


def _rejects(clause: str, what: str, cases: Callable[[EnvContract], list[bytes]]) -> None:
    def rejected(subject: EnvSubject) -> None:
        for action in _needed(cases(subject.contract), what):
            subject.refused(action, f"with an invalid {what}")

    rejected.__name__ = f"an_action_with_an_invalid_{what.replace(' ', '_')}_is_rejected"
    holds(clause)(rejected)


_rejects("structure.dict-keys", "Dict", action_cases.without_key)
_rejects("structure.box-shape", "Box", _resized(BoxSpec))
_rejects("structure.multi-discrete-shape", "MultiDiscrete", _resized(MultiDiscreteSpec))
_rejects("structure.multi-binary-shape", "MultiBinary", _resized(MultiBinarySpec))
_rejects("structure.tuple-arity", "Tuple", action_cases.of_another_arity)
_rejects("structure.discrete-domain", "Discrete", action_cases.outside_discrete)
_rejects("structure.multi-discrete-domain", "MultiDiscrete", action_cases.outside_multi_discrete)
_rejects("structure.nan", "Box of floats", action_cases.with_nan)
_rejects("dtype.exact-bytes", "Box", action_cases.widened)


@holds("structure.non-recoverable")
def a_structural_rejection_is_non_recoverable(subject: EnvSubject) -> None:
    contract = subject.contract
    found = [
        *action_cases.without_key(contract),
        *action_cases.outside_discrete(contract),
        *action_cases.with_nan(contract),
        *action_cases.resized(contract, BoxSpec),
        *action_cases.resized(contract, MultiDiscreteSpec),
        *action_cases.resized(contract, MultiBinarySpec),
    ]
    for action in _needed(found, "anything but Text"):
        with subject.after_reset() as session:
            error = session.refused(session.step_request(action), "with a structural violation")
            require(not error.is_recoverable, f"recoverable: {error.message!r}")
            # The server may also have ended the stream.
            with suppress(EndpointLostError):
                session.refused(session.step_request(), "after a non-recoverable error")


@holds("range.policy")
def values_out_of_range_follow_the_policy(subject: EnvSubject) -> None:
    """Actions beyond a finite bound; the operator states the server's policy."""
    found = _needed(action_cases.out_of_range(subject.contract), "Box with a finite bound")
    for action in found:
        _require_policy(subject, action, "an action beyond its bound")
    if subject.is_probe:
        infinite = subject.command(box=np.array([np.inf, 0.0], np.float32))
        _require_policy(subject, infinite, "an infinity against a finite bound")


@holds("range.infinite")
def an_infinity_is_in_range_where_the_bound_is_infinite(subject: EnvSubject) -> None:
    with subject.probe_after_reset() as session:
        ray = np.array([np.inf, -np.inf], np.float32)
        done = session.obey(ray=ray)
        echo = session.part(done.observation, "echo", "ray")
    require(WARNING_KEY not in done.infos, "an infinity within infinite bounds is warned about")
    require(np.array_equal(echo[0], ray), f"{ray} has become {echo[0]}")


@holds("range.text")
def texts_follow_the_policy(subject: EnvSubject) -> None:
    for action in _needed(action_cases.odd_texts(subject.contract), "Text of limited length"):
        _require_policy(subject, action, "a Text of a wrong length")
    if subject.is_probe:
        _require_policy(
            subject, subject.command(text="z"), "a Text with a character outside its charset"
        )


@holds("range.shared")
def observations_follow_the_same_policy(subject: EnvSubject) -> None:
    subject.probe()
    command = ProbeCommand.OBSERVE_OUT_OF_RANGE
    with subject.session() as session:
        response = session.ask(session.command_reset(command))
    _require_treated(subject, response, "an observation above its bound, at a Reset,")
    _require_policy(subject, subject.command(command), "an observation above its bound")


@holds("enforcement.observations")
def wrong_observations_do_not_reach_the_client(subject: EnvSubject) -> None:
    subject.probe()
    for command in _WRONG_OBSERVATIONS:
        why = f"that gives {command.name}"
        errors = [subject.refused(subject.command(command), why)]
        with subject.session() as session:
            errors.append(session.refused(session.command_reset(command), why))
        for error in errors:
            is_fatal = not error.is_recoverable
            require(is_fatal, f"{command.name} is recoverable: {error.message!r}")


@holds("enforcement.actions")
def actions_reach_the_environment_unchanged(subject: EnvSubject) -> None:
    subject.probe()
    parts: dict[str, Any] = {
        "box": np.array([0.25, -0.75], np.float32),
        "bits": np.array([1, 0, 1], np.int8),
        "choices": np.array([1, 2], np.int64),
        "text": "cab",
    }
    beyond = {"box": np.array([7.5, -8.5], np.float32)}
    is_strict = subject.validation is ValidationMode.STRICT
    with subject.after_reset() as session:
        for sent in (parts,) if is_strict else (parts, beyond):
            done = session.obey(pair=(1, -1), **sent)
            for name, value in sent.items():
                echo = session.part(done.observation, "echo", name)[0]
                require(np.array_equal(echo, value), f"{name} {value!r} has become {echo!r}")


@holds("dtype.declared")
def delivered_values_have_their_declared_dtype(subject: EnvSubject) -> None:
    with subject.session() as session:
        session.observation(session.reset().observation)
        for _ in range(3):
            done = session.step()
            session.observation(done.observation)
            if ended_lanes(done) and not subject.may_step_after_end:
                break
        if subject.is_probe:
            done = session.obey(ProbeCommand.OBSERVE_INTEGRAL_FLOAT)
            session.observation(done.observation)


@holds("dtype.integers")
def floats_become_integers_only_if_nothing_is_lost(subject: EnvSubject) -> None:
    with subject.probe_after_reset() as session:
        done = session.obey(ProbeCommand.OBSERVE_INTEGRAL_FLOAT)
        steps = session.steps_of(done)[0]
        require(steps == 1, f"a float of value 1 has become {steps}")
    for command in (ProbeCommand.OBSERVE_FRACTION, ProbeCommand.OBSERVE_TOO_LARGE):
        subject.refused(subject.command(command), f"that gives {command.name} for an integer")


@holds("dtype.floats")
def floats_are_narrowed(subject: EnvSubject) -> None:
    with subject.probe_after_reset() as session:
        done = session.obey(ProbeCommand.OBSERVE_DOUBLE)
        noise = session.part(done.observation, "noise")[0]
    expected = np.array([0.25, 0.1], np.float32)
    require(np.array_equal(noise, expected), f"the doubles 0.25 and 0.1 have become {noise}")


@holds("warnings.place")
def warnings_are_in_the_infos(subject: EnvSubject) -> None:
    with _warned(subject) as session:
        start = session.reset()
        require(WARNING_KEY not in start.infos, "a Reset that conforms is warned about")
        done = session.obey(ProbeCommand.OBSERVE_OUT_OF_RANGE)
        require(WARNING_KEY in done.infos, "a Step out of range has no warning in its infos")
    with _warned(subject) as session:
        start = session.reset(options={"command": int(ProbeCommand.OBSERVE_OUT_OF_RANGE)})
        require(WARNING_KEY in start.infos, "a Reset out of range has no warning in its infos")


@holds("warnings.once")
def each_violation_is_reported_once(subject: EnvSubject) -> None:
    """By kind and path, during the session; another path or kind is reported again."""
    beyond = np.array([2.0, 0.0], np.float32)
    with _warned(subject) as session:
        session.reset()
        warned = [
            WARNING_KEY in done.infos
            for done in (
                session.obey(ProbeCommand.OBSERVE_OUT_OF_RANGE),
                session.obey(ProbeCommand.OBSERVE_OUT_OF_RANGE),
                session.reset(),
                session.obey(ProbeCommand.OBSERVE_OUT_OF_RANGE),
                session.obey(box=beyond),
                session.obey(text="aaaaa"),
                session.obey(text="z"),
                session.obey(text="zzzzz"),
            )
        ]
    require(warned[0], "the first violation is not warned about")
    require(warned[1:4] == [False] * 3, "the same violation is warned about again")
    require(warned[4] and warned[5], "a violation of another path is not warned about")
    require(warned[6], "another kind of violation of the same path is not warned about")
    require(not warned[7], "two violations that were warned about before are warned about again")


@holds("warnings.advisory")
def a_warning_leaves_value_and_session_unchanged(subject: EnvSubject) -> None:
    with _warned(subject) as session:
        session.reset()
        done = session.obey(ProbeCommand.OBSERVE_OUT_OF_RANGE)
        noise = np.asarray(session.part(done.observation, "noise"))[0].tolist()
        require(noise == [2.0, 0.5], f"[2, 0.5] is delivered as {noise}")
        session.obey()
        session.reset()


def _warned(subject: EnvSubject) -> AbstractContextManager[RawEnvSession]:
    subject.probe()
    if subject.validation is not ValidationMode.WARN:
        raise ClauseNotObservable(f"the server's policy is {subject.validation.value}")
    return subject.session()


def _require_policy(subject: EnvSubject, action: bytes, what: str) -> None:
    with subject.after_reset() as session:
        response = session.ask(session.step_request(action))
    _require_treated(subject, response, what)


def _require_treated(subject: EnvSubject, response: EnvResponse, what: str) -> None:
    policy = subject.validation
    if isinstance(response, EnvFailed):
        if response.is_recoverable and not subject.is_probe:
            raise ClauseNotObservable(f"the environment itself refuses {what}: {response.message}")
        message = f"{policy.value}: {what} is rejected: {response.message!r}"
        require(policy is ValidationMode.STRICT and not response.is_recoverable, message)
        return
    if not isinstance(response, ResetDone | StepDone):
        raise ClauseBroken(f"{what} is answered with {type(response).__name__}")
    require(policy is not ValidationMode.STRICT, f"strict: {what} is not rejected")
    is_warned = WARNING_KEY in response.infos
    if policy is ValidationMode.WARN:
        require(is_warned, f"warn: {what} is delivered without a warning")
    else:
        require(not is_warned, f"off: {what} is warned about")


def _needed(found: list[bytes], what: str) -> list[bytes]:
    if not found:
        raise ClauseNotObservable(f"the action space has no {what}")
    return found
