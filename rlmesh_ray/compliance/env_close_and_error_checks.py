"""Checks of Close and of "Timeouts and Errors"."""

import time

import numpy as np

from rlmesh_ray.compliance.checks import CheckRegistry, ClauseBroken, require
from rlmesh_ray.compliance.env_subject import EnvSubject, RawEnvSession
from rlmesh_ray.compliance.probe import SLEEP_S, ProbeCommand
from rlmesh_ray.errors import EndpointLostError
from rlmesh_ray.protocol.messages import Close, Closed, EnvErrorCode, Render, Reset, Step

ENV: CheckRegistry[EnvSubject] = CheckRegistry()

_TIMEOUT_MS = 300
# Well before the environment wakes; a busy machine answers late.
_LATE_S = 0.9
"""Longest time from the deadline to its response, network included."""


@ENV.holds("close.answer")
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


@ENV.holds("close.end")
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


@ENV.holds("timeout.in-band")
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


@ENV.holds("errors.interrupted")
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


@ENV.holds("errors.content")
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


@ENV.holds("errors.recoverable")
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
