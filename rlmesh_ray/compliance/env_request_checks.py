"""Checks of "Ordering", "Vectorization", "Reset" and "Step", and of Render."""

import time
from collections import Counter
from contextlib import suppress

import numpy as np

from rlmesh_ray.client.remote_vector_env import decode_png
from rlmesh_ray.compliance.action_cases import packed_rest
from rlmesh_ray.compliance.checks import ClauseBroken, ClauseNotObservable, holds, require
from rlmesh_ray.compliance.env_subject import ENV, EnvSubject, RawEnvSession, ended_lanes, is_same
from rlmesh_ray.compliance.probe import SLEEP_S, ProbeCommand
from rlmesh_ray.errors import EndpointLostError
from rlmesh_ray.protocol.messages import (
    Close,
    Closed,
    EnvErrorCode,
    EnvFailed,
    EnvResponse,
    Render,
    Rendered,
    Reset,
    ResetDone,
    Step,
)

_PIPELINED_STEPS = 40


@holds(ENV, "ordering.arrival")
def responses_come_in_the_order_of_arrival(subject: EnvSubject) -> None:
    """Many requests of every kind are sent before any response is read."""
    with subject.session() as session:
        sent, responses = _pipeline(subject, session)
    first_seen = list(dict.fromkeys(response.request_id for response in responses))
    expected = [request_id for request_id in sent if request_id in first_seen]
    require(first_seen == expected, f"responses came in the order {first_seen}")


@holds(ENV, "ordering.one-response")
def every_request_has_one_response(subject: EnvSubject) -> None:
    """Ids are counted over all responses up to the end of the stream."""
    with subject.session() as session:
        sent, responses = _pipeline(subject, session)
    counts = Counter(response.request_id for response in responses)
    strange = {key: counts[key] for key in (*sent, *counts) if counts[key] != 1 or key not in sent}
    require(not strange, f"responses by request_id, where it is not one: {strange}")


@holds(ENV, "ordering.in-band")
def what_cannot_be_satisfied_is_answered_in_band(subject: EnvSubject) -> None:
    """Invalid arguments, each in its own session."""
    lanes = subject.contract.num_envs
    wrong = packed_rest(subject.contract) + b"\xff"
    requests: list[tuple[Reset | Step, str]] = [
        (Reset("1", seeds=(1,) * (lanes + 1)), "with a seed too many"),
        (Reset("1", env_indices=(lanes,)), "of a lane too many"),
        (Reset("1", env_indices=(-1,)), "of lane -1"),
        (Step("1", wrong), "with an action of a wrong size"),
    ]
    for request, why in requests:
        with subject.session() as session:
            session.reset()
            session.refused(request, why)


@holds(ENV, "vector.width")
def the_vector_is_as_wide_as_the_contract_says(subject: EnvSubject) -> None:
    """The contract's width against that of the first response."""
    lanes = subject.contract.num_envs
    require(lanes >= 1, f"the contract has num_envs = {lanes}")
    with subject.session() as session:
        ids = session.reset().episode_ids
    require(len(ids) == lanes, f"num_envs is {lanes}, but Reset gives {len(ids)} episode ids")


@holds(ENV, "vector.batches")
def values_are_batches_over_all_lanes(subject: EnvSubject) -> None:
    """Observations decode as batches; an action over more or fewer lanes is refused."""
    contract = subject.contract
    with subject.session() as session:
        session.observation(session.reset().observation)
        session.observation(session.step().observation)
    for width in {contract.num_envs + 1, contract.num_envs - 1}:
        action = packed_rest(contract, width)
        if action == packed_rest(contract):
            raise ClauseNotObservable("actions have no bytes")
        with subject.session() as session:
            session.reset()
            session.refused(session.step_request(action), f"with actions for {width} lanes")


@holds(ENV, "vector.entries")
def rewards_and_masks_have_one_entry_a_lane(subject: EnvSubject) -> None:
    """In every response up to the one that ends an episode; ``step`` counts them."""
    with subject.session() as session:
        session.reset()
        if not ended_lanes(session.step()):
            session.until_episode_ends()


@holds(ENV, "vector.index-order")
def entries_stand_in_the_order_of_the_lanes(subject: EnvSubject) -> None:
    """Only the last of several lanes ends, and only it ends."""
    lanes = subject.probe().num_envs
    if lanes < 2:
        raise ClauseNotObservable("needs more than one lane")
    idle = [ProbeCommand.GO_ON] * (lanes - 1)
    with subject.session() as session:
        session.reset()
        done = session.obey(*idle, ProbeCommand.TERMINATE)
        cut = session.obey(ProbeCommand.TRUNCATE)
    require(_set(done.terminated) == [lanes - 1], f"lane {lanes - 1} ended: {done.terminated!r}")
    require(_set(cut.truncated) == [0], f"lane 0 was truncated: {cut.truncated!r}")
    ended = [episode.env_index for episode in (*done.completed_episodes, *cut.completed_episodes)]
    require(ended == [lanes - 1, 0], f"records are for lanes {ended}, not {[lanes - 1, 0]}")


@holds(ENV, "reset.all-lanes")
def reset_starts_all_lanes(subject: EnvSubject) -> None:
    """In mid-episode: every lane has a new id; the probe is in the state of the first Reset."""
    seeds = tuple(range(7, 7 + subject.contract.num_envs))
    with subject.session() as session:
        first = session.reset(seeds=seeds)
        session.step()
        again = session.reset(seeds=seeds)
        start = session.observation(first.observation)
        restart = session.observation(again.observation)
    kept = set(first.episode_ids) & set(again.episode_ids)
    require(not kept, f"a Reset in mid-episode keeps the ids {sorted(kept)}")
    if subject.is_probe:
        is_back = is_same(start, restart)
        require(is_back, "a Reset in mid-episode with the same seeds starts elsewhere")


@holds(ENV, "reset.first")
def a_step_before_the_first_reset_is_refused(subject: EnvSubject) -> None:
    """NOT_READY; after a Reset it succeeds."""
    with subject.session() as session:
        error = session.refused(session.step_request(), "before the first Reset")
        require(error.code is EnvErrorCode.NOT_READY, f"its code is {error.code.name}")
        require(error.is_recoverable, "it is non-recoverable")
        session.reset()
        session.step()


@holds(ENV, "reset.seeds")
def seeds_are_empty_or_one_a_lane(subject: EnvSubject) -> None:
    """Any other number is refused. With the probe: each seed reaches its own lane."""
    lanes = subject.contract.num_envs
    seeds = tuple(range(7, 7 + lanes))
    with subject.session() as session:
        session.reset()
        start = session.observation(session.reset(seeds=seeds).observation)
        mirrored = session.observation(session.reset(seeds=seeds[::-1]).observation)
    if subject.is_probe:
        is_mirrored = is_same(start, [column[::-1] for column in mirrored])
        require(is_mirrored, "the same seeds in another order do not give the same lanes in it")
    for count in {lanes + 1, lanes - 1} - {0}:
        with subject.session() as session:
            request = Reset(session.new_id(), seeds=tuple(range(count)))
            session.refused(request, f"with {count} seeds for {lanes} lanes")


@holds(ENV, "reset.response")
def reset_gives_observations_and_ids(subject: EnvSubject) -> None:
    """The batch decodes, and every lane has a different id."""
    with subject.session() as session:
        done = session.reset()
        session.observation(done.observation)
    ids = done.episode_ids
    require(all(ids), f"episode ids are empty: {list(ids)}")
    require(len(set(ids)) == len(ids), f"lanes share an episode id: {list(ids)}")


@holds(ENV, "step.all-lanes")
def a_step_is_one_of_each_lane(subject: EnvSubject) -> None:
    """By the records in the response to Close; the probe counts itself."""
    with subject.session() as session:
        session.reset()
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


@holds(ENV, "step.response")
def a_step_gives_all_there_is(subject: EnvSubject) -> None:
    """Observation, current ids, and the environment's infos."""
    with subject.session() as session:
        ids = session.reset().episode_ids
        done = session.step_on()
        session.observation(done.observation)
    require(done.episode_ids == ids, f"ids have changed from {ids} to {done.episode_ids}")
    if subject.is_probe:
        require("steps" in done.infos, f"the infos have only {sorted(done.infos)}")


@holds(ENV, "wire.unreadable")
def a_frame_that_is_no_request_is_answered_in_band(subject: EnvSubject) -> None:
    """A message without a kind. Bytes that are no message may also end the stream with a status."""
    with subject.session() as session:
        session.reset()
        _require_error(session, b"")
    with subject.session() as session:
        session.reset()
        # In many servers gRPC decodes, and ends the stream with a status.
        with suppress(EndpointLostError):
            _require_error(session, b"\xff\xff\xff\xff")


@holds(ENV, "wire.bare-join")
def a_join_without_a_session_id_is_served(subject: EnvSubject) -> None:
    """By its first message: clients of other implementations have no session id."""
    with subject.session(is_bare=True) as session:
        session.reset()
        session.step()


@holds(ENV, "wire.partial-reset")
def env_indices_restart_just_those_lanes(subject: EnvSubject) -> None:
    """The other lanes keep id, observation and count; a server without the feature refuses it."""
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
        if not isinstance(response, ResetDone):
            raise ClauseBroken(f"Reset is answered with {type(response).__name__}")
        ids = response.episode_ids
        kept = session.observation(response.observation)
        old = session.observation(moved.observation)
        records = session.close().final_episodes
    others = ids[: lanes - 1]
    require(
        others == moved.episode_ids[: lanes - 1],
        f"lanes that were not named have new ids: {others}",
    )
    fresh = ids[lanes - 1 :]
    require(bool(fresh and fresh[0]), "the lane that was named has no id")
    require(fresh[0] not in before, f"the lane that was named keeps its id {fresh[0]}")
    for one, other in zip(kept, old, strict=True):
        is_kept = np.array_equal(one[: lanes - 1], other[: lanes - 1])
        require(is_kept, "lanes that were not named have moved")
    for record in records:
        expected = int(record.env_index < lanes - 1)
        require(
            record.step_count == expected,
            f"lane {record.env_index} has {record.step_count} steps at the end, not {expected}",
        )


@holds(ENV, "wire.step-lanes")
def env_indices_of_a_step_are_refused(subject: EnvSubject) -> None:
    """The field is reserved: a Step steps all lanes or none."""
    with subject.session() as session:
        session.reset()
        action = packed_rest(subject.contract)
        request = Step(session.new_id(), action, env_indices=(0,))
        session.refused(request, "of some lanes")


@holds(ENV, "render.frame")
def render_gives_a_frame_where_the_mode_has_one(subject: EnvSubject) -> None:
    """``rgb_array`` has frames after a Reset; without a mode there is none."""
    mode = subject.contract.render_mode
    with subject.session() as session:
        session.reset()
        response = session.ask(Render(session.new_id()))
    if not isinstance(response, Rendered):
        raise ClauseBroken(f"Render is answered with {type(response).__name__}")
    if mode == "rgb_array":
        require(response.png is not None, "the mode is rgb_array, but there is no frame")
        try:
            decode_png(response.png or b"")
        except (OSError, SyntaxError, ValueError) as error:  # as Pillow reports it
            raise ClauseBroken(f"the frame is no PNG: {error}") from error
    elif mode:
        raise ClauseNotObservable(f"what mode {mode!r} draws is not known here")
    else:
        require(response.png is None, "there is no render mode, but a frame")


def _pipeline(subject: EnvSubject, session: RawEnvSession) -> tuple[list[str], list[EnvResponse]]:
    """Send a whole session at once; return the sent ids, and all responses."""
    requests: list[Reset | Step | Render | Close] = [session.step_request()]
    for number in range(_PIPELINED_STEPS):
        if number % 10 == 0:
            requests.append(Reset(session.new_id()))
        if number % 7 == 0:
            requests.append(Render(session.new_id()))
            requests.append(Reset(session.new_id(), env_indices=(subject.contract.num_envs,)))
        requests.append(session.step_request())
    requests.append(Close(session.new_id()))
    for request in requests:
        session.send(request)
    return [request.request_id for request in requests], session.until_end()


def _require_error(session: RawEnvSession, frame: bytes) -> None:
    session.send_frame(frame)
    response = session.receive()
    is_error = isinstance(response, EnvFailed)
    require(is_error, f"the frame {frame!r} is answered with {type(response).__name__}")


def _set(mask: bytes) -> list[int]:
    return [lane for lane, flag in enumerate(mask) if flag]


_TIMEOUT_MS = 300
# Well before the environment wakes; a busy machine answers late.
_LATE_S = 0.9
"""Longest time from the deadline to its response, network included."""


@holds(ENV, "close.answer")
def close_reports_the_running_episodes(subject: EnvSubject) -> None:
    """One record for every lane whose episode is running, without a cause."""
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


@holds(ENV, "close.end")
def the_stream_ends_after_close(subject: EnvSubject) -> None:
    """Also when more requests were sent after it: none of them is answered."""
    with subject.session() as session:
        session.reset()
        session.send(Close("last"))
        session.send(Reset("behind"))
        session.send(Close("far behind"))
        try:
            responses = session.until_end()
        except EndpointLostError as error:
            raise ClauseBroken(
                f"after Close the stream breaks instead of ending: {error}"
            ) from error
    closed = [response.request_id for response in responses if isinstance(response, Closed)]
    require(closed == ["last"], f"responses to Close came for {closed}")
    require(len(responses) == 1, f"{len(responses) - 1} responses came after that to Close")


@holds(ENV, "timeout.in-band")
def a_deadline_that_passes_is_answered_in_band(subject: EnvSubject) -> None:
    """TIMEOUT, in time, of a Step and of a Reset; the late result is dropped."""
    subject.probe()
    with subject.session() as session:
        session.reset()
        start_s = time.monotonic()
        session.ask(Render(session.new_id()))
        round_trip_s = time.monotonic() - start_s
        step = Step(session.new_id(), session.command(ProbeCommand.SLEEP), _TIMEOUT_MS)
        is_recoverable = _require_timeout(session, step, round_trip_s)
        if not is_recoverable:
            return
        fresh = session.steps_of(session.reset())
        require(set(fresh) == {0}, f"after TIMEOUT and Reset the lanes are at steps {fresh}")
        done = session.obey(box=np.array([0.5, 0.0], np.float32))
        steps = session.steps_of(done)
        is_own = set(steps) == {1} and set(done.rewards) == {0.5}
        require(is_own, "the first Step after TIMEOUT and Reset has an older one's result")
    with subject.session() as session:
        options = {"command": int(ProbeCommand.SLEEP)}
        reset = Reset(session.new_id(), options=options, timeout_ms=_TIMEOUT_MS)
        _require_timeout(session, reset, round_trip_s)


def _require_timeout(session: RawEnvSession, request: Step | Reset, round_trip_s: float) -> bool:
    """Require TIMEOUT in time; return whether the session can go on."""
    start_s = time.monotonic()
    error = session.refused(request, f"of {SLEEP_S:g} s within {_TIMEOUT_MS} ms")
    waited_s = time.monotonic() - start_s
    require(error.code is EnvErrorCode.TIMEOUT, f"its code is {error.code.name}")
    require(
        waited_s <= _TIMEOUT_MS / 1000 + _LATE_S + 2 * round_trip_s,
        f"the answer to timeout_ms={_TIMEOUT_MS} came after {waited_s * 1000:.0f} ms",
    )
    return error.is_recoverable


@holds(ENV, "errors.interrupted")
def episodes_that_an_error_ends_are_reported(subject: EnvSubject) -> None:
    """In the error itself, once, without a cause; a Reset begins new ones."""
    subject.probe()
    with subject.session() as session:
        ids = session.reset().episode_ids
        session.obey()
        request = Step(session.new_id(), session.command(ProbeCommand.FAIL))
        error = session.refused(request, "of an environment that raises")
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


@holds(ENV, "errors.content")
def an_error_has_a_code_and_a_message(subject: EnvSubject) -> None:
    """For a refused request, and for an environment that raises."""
    with subject.session() as session:
        errors = [session.refused(session.step_request(), "before the first Reset")]
        if subject.is_probe:
            session.reset()
            request = session.step_request(session.command(ProbeCommand.FAIL))
            errors.append(session.refused(request, "of an environment that raises"))
    for error in errors:
        require(error.code is not EnvErrorCode.UNSPECIFIED, f"no code: {error.message!r}")
        require(bool(error.message), f"no message with {error.code.name}")


@holds(ENV, "errors.recoverable")
def a_session_goes_on_after_a_recoverable_error(subject: EnvSubject) -> None:
    """After a refusal with any request, after an environment's error with a Reset."""
    lanes = subject.contract.num_envs
    with subject.session() as session:
        session.reset()
        request = Reset(session.new_id(), seeds=(1,) * (lanes + 1))
        if session.refused(request, "with a seed too many").is_recoverable:
            session.step()
        if subject.is_probe:
            failing = Step(session.new_id(), session.command(ProbeCommand.FAIL))
            error = session.refused(failing, "of an environment that raises")
            require(error.is_recoverable, "an environment that raises is non-recoverable")
            session.reset()
            session.step()
