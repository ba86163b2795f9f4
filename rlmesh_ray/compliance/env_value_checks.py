"""Checks of "Value Conformance": structure, range, dtype, warnings, in both directions."""

from contextlib import AbstractContextManager, suppress
from typing import Any

import numpy as np

from rlmesh_ray.compliance import action_cases
from rlmesh_ray.compliance.checks import ClauseBroken, ClauseNotObservable, holds, require
from rlmesh_ray.compliance.env_subject import ENV, EnvSubject, RawEnvSession, ended_lanes
from rlmesh_ray.compliance.probe import ProbeCommand
from rlmesh_ray.errors import EndpointLostError
from rlmesh_ray.protocol.messages import EnvFailed, EnvResponse, Reset, ResetDone, StepDone
from rlmesh_ray.spaces.spec import BoxSpec, MultiBinarySpec, MultiDiscreteSpec
from rlmesh_ray.spaces.validation import ValidationMode

WARNING_KEY = "rlmesh.conformance.warning"

_WRONG_OBSERVATIONS = (
    ProbeCommand.OBSERVE_NAN,
    ProbeCommand.OBSERVE_WRONG_SHAPE,
    ProbeCommand.OBSERVE_MISSING_KEY,
)


@holds(ENV, "structure.dict-keys")
def a_dict_without_a_declared_key_is_rejected(subject: EnvSubject) -> None:
    """By an action whose first Dict lacks a key."""
    _require_rejected(subject, action_cases.without_key(subject.contract), "Dict")


@holds(ENV, "structure.box-shape")
def a_box_of_another_shape_is_rejected(subject: EnvSubject) -> None:
    """By actions with an element too many, and one too few."""
    _require_rejected(subject, action_cases.resized(subject.contract, BoxSpec), "Box")


@holds(ENV, "structure.multi-discrete-shape")
def a_multi_discrete_of_another_shape_is_rejected(subject: EnvSubject) -> None:
    """By actions with an element too many, and one too few."""
    found = action_cases.resized(subject.contract, MultiDiscreteSpec)
    _require_rejected(subject, found, "MultiDiscrete")


@holds(ENV, "structure.multi-binary-shape")
def a_multi_binary_of_another_shape_is_rejected(subject: EnvSubject) -> None:
    """By actions with an element too many, and one too few."""
    found = action_cases.resized(subject.contract, MultiBinarySpec)
    _require_rejected(subject, found, "MultiBinary")


@holds(ENV, "structure.tuple-arity")
def a_tuple_with_more_or_fewer_parts_is_rejected(subject: EnvSubject) -> None:
    """By actions whose first Tuple has a part less, and one more."""
    _require_rejected(subject, action_cases.of_another_arity(subject.contract), "Tuple")


@holds(ENV, "structure.discrete-domain")
def a_discrete_outside_its_domain_is_rejected(subject: EnvSubject) -> None:
    """By actions one above, and one below."""
    _require_rejected(subject, action_cases.outside_discrete(subject.contract), "Discrete")


@holds(ENV, "structure.multi-discrete-domain")
def a_multi_discrete_element_outside_its_own_domain_is_rejected(subject: EnvSubject) -> None:
    """By actions one above, where another element may be that large, and one below."""
    found = action_cases.outside_multi_discrete(subject.contract)
    _require_rejected(subject, found, "MultiDiscrete")


@holds(ENV, "structure.nan")
def nan_is_rejected(subject: EnvSubject) -> None:
    """Also beside an element that is merely out of range."""
    _require_rejected(subject, action_cases.with_nan(subject.contract), "Box of floats")


@holds(ENV, "structure.non-recoverable")
def a_structural_rejection_is_non_recoverable(subject: EnvSubject) -> None:
    """Of every kind that the action space allows; afterwards all requests are refused."""
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
        with subject.session() as session:
            session.reset()
            error = session.refused(session.step_request(action), "with a structural violation")
            require(not error.is_recoverable, f"recoverable: {error.message!r}")
            # The server may also have ended the stream.
            with suppress(EndpointLostError):
                session.refused(session.step_request(), "after a non-recoverable error")


@holds(ENV, "range.policy")
def values_out_of_range_follow_the_policy(subject: EnvSubject) -> None:
    """Actions beyond a finite bound; the operator states the server's policy."""
    found = _needed(action_cases.out_of_range(subject.contract), "Box with a finite bound")
    for action in found:
        _require_policy(subject, action, "an action beyond its bound")
    if subject.is_probe:
        with subject.session() as session:
            infinite = session.command(box=np.array([np.inf, 0.0], np.float32))
        _require_policy(subject, infinite, "an infinity against a finite bound")


@holds(ENV, "range.infinite")
def an_infinity_is_in_range_where_the_bound_is_infinite(subject: EnvSubject) -> None:
    """Delivered without a warning, under every policy."""
    subject.probe()
    with subject.session() as session:
        session.reset()
        ray = np.array([np.inf, -np.inf], np.float32)
        done = session.obey(ray=ray)
        echo = session.part(done.observation, "echo", "ray")
    require(WARNING_KEY not in done.infos, "an infinity within infinite bounds is warned about")
    require(np.array_equal(echo[0], ray), f"{ray} has become {echo[0]}")


@holds(ENV, "range.text")
def texts_follow_the_policy(subject: EnvSubject) -> None:
    """One that is too long or too short, and one with a character outside the charset."""
    for action in _needed(action_cases.odd_texts(subject.contract), "Text of limited length"):
        _require_policy(subject, action, "a Text of a wrong length")
    if subject.is_probe:
        with subject.session() as session:
            outside = session.command(text="z")
        _require_policy(subject, outside, "a Text with a character outside its charset")


@holds(ENV, "range.shared")
def observations_follow_the_same_policy(subject: EnvSubject) -> None:
    """An observation above its bound, at a step and at a reset."""
    subject.probe()
    command = ProbeCommand.OBSERVE_OUT_OF_RANGE
    with subject.session() as session:
        action = session.command(command)
        response = session.ask(Reset(session.new_id(), options={"command": int(command)}))
    _require_treated(subject, response, "an observation above its bound, at a Reset,")
    _require_policy(subject, action, "an observation above its bound")


@holds(ENV, "enforcement.observations")
def wrong_observations_do_not_reach_the_client(subject: EnvSubject) -> None:
    """NaN, a wrong shape, a missing key: an error in their place, at a step and at a reset."""
    subject.probe()
    for command in _WRONG_OBSERVATIONS:
        with subject.session() as session:
            session.reset()
            step = session.step_request(session.command(command))
            _require_fatal(session.refused(step, f"that gives {command.name}"), command)
        with subject.session() as session:
            reset = Reset(session.new_id(), options={"command": int(command)})
            _require_fatal(session.refused(reset, f"that gives {command.name}"), command)


@holds(ENV, "enforcement.actions")
def actions_reach_the_environment_as_they_were_sent(subject: EnvSubject) -> None:
    """By the probe's echo, part by part; also a value out of range, where it is delivered."""
    subject.probe()
    parts = {
        "box": np.array([0.25, -0.75], np.float32),
        "bits": np.array([1, 0, 1], np.int8),
        "choices": np.array([1, 2], np.int64),
        "text": "cab",
    }
    with subject.session() as session:
        session.reset()
        done = session.obey(pair=(1, -1), **parts)
        for name, value in parts.items():
            _require_echo(session, done, name, value)
        if subject.validation is not ValidationMode.STRICT:
            beyond = np.array([7.5, -8.5], np.float32)
            _require_echo(session, session.obey(box=beyond), "box", beyond)


@holds(ENV, "dtype.declared")
def delivered_values_have_their_declared_dtype(subject: EnvSubject) -> None:
    """Every batch has just the bytes that the declared dtypes need."""
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


@holds(ENV, "dtype.exact-bytes")
def bytes_of_another_dtype_are_rejected(subject: EnvSubject) -> None:
    """A Box whose elements are sent at twice their width."""
    _require_rejected(subject, action_cases.widened(subject.contract), "Box")


@holds(ENV, "dtype.integers")
def floats_become_integers_only_if_nothing_is_lost(subject: EnvSubject) -> None:
    """An integral float is coerced; a fraction and too large a float are rejected."""
    subject.probe()
    with subject.session() as session:
        session.reset()
        done = session.obey(ProbeCommand.OBSERVE_INTEGRAL_FLOAT)
        steps = session.steps_of(done)[0]
        require(steps == 1, f"a float of value 1 has become {steps}")
    for command in (ProbeCommand.OBSERVE_FRACTION, ProbeCommand.OBSERVE_TOO_LARGE):
        with subject.session() as session:
            session.reset()
            request = session.step_request(session.command(command))
            session.refused(request, f"that gives {command.name} for an integer")


@holds(ENV, "dtype.floats")
def floats_are_narrowed(subject: EnvSubject) -> None:
    """A double for a float32 loses precision and nothing else."""
    subject.probe()
    with subject.session() as session:
        session.reset()
        done = session.obey(ProbeCommand.OBSERVE_DOUBLE)
        noise = session.part(done.observation, "noise")[0]
    expected = np.array([0.25, 0.1], np.float32)
    require(np.array_equal(noise, expected), f"the doubles 0.25 and 0.1 have become {noise}")


@holds(ENV, "warnings.place")
def warnings_stand_in_the_infos(subject: EnvSubject) -> None:
    """Under the reserved key, of a step and of a reset."""
    with _warned(subject) as session:
        start = session.reset()
        require(WARNING_KEY not in start.infos, "a Reset that conforms is warned about")
        done = session.obey(ProbeCommand.OBSERVE_OUT_OF_RANGE)
        require(WARNING_KEY in done.infos, "a Step out of range has no warning in its infos")
    with _warned(subject) as session:
        start = session.reset(options={"command": int(ProbeCommand.OBSERVE_OUT_OF_RANGE)})
        require(WARNING_KEY in start.infos, "a Reset out of range has no warning in its infos")


@holds(ENV, "warnings.once")
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


@holds(ENV, "warnings.advisory")
def a_warning_leaves_value_and_session_as_they_are(subject: EnvSubject) -> None:
    """The value is delivered unaltered; later Steps and Resets succeed."""
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


def _require_rejected(subject: EnvSubject, found: list[bytes], what: str) -> None:
    for action in _needed(found, what):
        with subject.session() as session:
            session.reset()
            session.refused(session.step_request(action), f"with an invalid {what}")


def _require_fatal(error: EnvFailed, command: ProbeCommand) -> None:
    require(not error.is_recoverable, f"{command.name} is recoverable: {error.message!r}")


def _require_policy(subject: EnvSubject, action: bytes, what: str) -> None:
    with subject.session() as session:
        session.reset()
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


def _require_echo(session: RawEnvSession, done: StepDone, name: str, value: Any) -> None:
    echo = session.part(done.observation, "echo", name)[0]
    require(np.array_equal(echo, value), f"{name} {value!r} has become {echo!r}")


def _needed(found: list[bytes], what: str) -> list[bytes]:
    if not found:
        raise ClauseNotObservable(f"there is no {what} in the action space")
    return found
