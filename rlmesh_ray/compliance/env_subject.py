"""EnvSubject: the env endpoint under test, and raw sessions with it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import numpy as np

from rlmesh_ray.client.join_stream import JoinStream
from rlmesh_ray.compliance.action_cases import commands, is_probe, packed_rest
from rlmesh_ray.compliance.checks import Check, ClauseBroken, ClauseNotObservable, require
from rlmesh_ray.compliance.probe import ProbeCommand
from rlmesh_ray.compliance.raw_session import RawSession, Subject, joined
from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.messages import (
    Close,
    Closed,
    EnvFailed,
    EnvRequest,
    EnvResponse,
    Rendered,
    Reset,
    ResetDone,
    Step,
    StepDone,
)
from rlmesh_ray.spaces.batch import Column, leaves
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.validation import ValidationMode
from rlmesh_ray.wire.rlmesh_v1 import env as wire
from rlmesh_ray.wire.rlmesh_v1 import values

MOST_STEPS = 1000
"""Most steps in which a check waits for an episode to end by itself."""

ResponseT = TypeVar("ResponseT", ResetDone, StepDone, Rendered, Closed, EnvFailed)


@dataclass
class EnvSubject(Subject):
    """An EnvService under test; its sessions are opened one at a time."""

    validation: ValidationMode = ValidationMode.WARN
    """The server's validation policy, as the operator states it."""
    is_endless: bool = field(default=False, init=False)
    """Whether no episode ended within ``MOST_STEPS``; the next check need not wait again."""

    service: ClassVar[str] = "/rlmesh.env.v1.EnvService/"
    wire: ClassVar[Any] = wire

    @cached_property
    def contract(self) -> EnvContract:
        """The endpoint's contract.

        Raises:
            ClauseBroken: A compatible handshake has none.
        """
        answer = self.shake_hands()
        if not answer.compatible:
            raise ClauseBroken(f"our own handshake is refused: {answer.error_message!r}")
        if not isinstance(answer.contract, EnvContract):
            raise ClauseBroken("a compatible handshake came without a contract")
        return answer.contract

    @property
    def is_probe(self) -> bool:
        return is_probe(self.contract)

    @property
    def may_step_after_end(self) -> bool:
        return self.is_probe or self.contract.autoreset_mode is AutoresetMode.NEXT_STEP

    def probe(self) -> EnvContract:
        """Return the contract if the environment is the probe.

        Raises:
            ClauseNotObservable: It is another environment.
        """
        if not self.is_probe:
            raise ClauseNotObservable("needs the probe environment, which executes commands")
        return self.contract

    def raw_session(self) -> None:
        with self.session() as session:
            session.reset()
            session.step()

    @contextmanager
    def session(self, *, is_bare: bool = False) -> "Iterator[RawEnvSession]":
        """Open a session as a conforming client does; close it at the end.

        Args:
            is_bare: Whether to omit the session id of the handshake.
        """
        offer = wire.pack_handshake_request(self.offer())
        with joined(
            self.connect_options,
            self.service,
            offer,
            wire.parse_handshake_response,
            is_bare=is_bare,
        ) as stream:
            session = RawEnvSession(stream, self)
            try:
                yield session
            finally:
                # Also after a failure: the server may have one place only. Only the checks of
                # Close look at the response.
                session.leave(Close(session.new_id()))


ENV: dict[str, Check[EnvSubject]] = {}
"""The checks of the service, which the modules of checks fill."""


class RawEnvSession(RawSession[EnvRequest, EnvResponse]):
    """One Join stream of an EnvService.

    Args:
        stream: The stream; not owned.
        subject: The endpoint.
    """

    def __init__(self, stream: JoinStream, subject: EnvSubject) -> None:
        super().__init__(stream, wire.pack_request, wire.parse_response, subject.answer_timeout_s)
        self._subject = subject
        self._contract = subject.contract

    def reset(self, **fields: Any) -> ResetDone:
        return _expect(self.ask(Reset(self.new_id(), **fields)), ResetDone, "Reset")

    def step(self, action: bytes | None = None) -> StepDone:
        """Step with ``action``; by default one that lies within the action space.

        Raises:
            ClauseBroken: The response is no StepResponse, or has another number of lanes.
        """
        done = _expect(self.ask(self.step_request(action)), StepDone, "Step")
        lanes = self._contract.num_envs
        for name in ("rewards", "terminated", "truncated"):
            count = len(getattr(done, name))
            require(count == lanes, f"{name} has {count} entries for {lanes} lanes")
        for record in done.completed_episodes:
            is_lane = 0 <= record.env_index < lanes
            require(is_lane, f"a record is for lane {record.env_index} of {lanes}")
        return done

    def step_request(self, action: bytes | None = None) -> Step:
        return Step(self.new_id(), packed_rest(self._contract) if action is None else action)

    def step_on(self) -> StepDone:
        """Step as ``step`` does, and require that no episode ends.

        Raises:
            ClauseNotObservable: An episode ends.
        """
        done = self.step()
        if ended_lanes(done):
            raise ClauseNotObservable("episodes end at once")
        return done

    def obey(self, *by_lane: ProbeCommand, **parts: Any) -> StepDone:
        """Step the probe with one command for each lane; further lanes get GO_ON."""
        return self.step(self.command(*by_lane, **parts))

    def command(self, *by_lane: ProbeCommand, **parts: Any) -> bytes:
        idle = [ProbeCommand.GO_ON] * (self._contract.num_envs - len(by_lane))
        columns = commands(*by_lane, *idle, **parts)
        return values.encode_batch(self._contract.action_space, columns, self._contract.num_envs)

    def refused(self, request: EnvRequest, why: str) -> EnvFailed:
        """Send a request that must fail, since ``why``; return the error."""
        response = self.ask(request)
        if not isinstance(response, EnvFailed):
            name = type(response).__name__
            raise ClauseBroken(
                f"{type(request).__name__} {why} is answered with {name}, not an error"
            )
        return response

    def close(self) -> Closed:
        """Send Close; return the response."""
        return _expect(self.ask(Close(self.new_id())), Closed, "Close")

    def until_episode_ends(self) -> StepDone:
        """Step until a lane's episode has ended; return that step.

        Raises:
            ClauseNotObservable: No episode ends.
        """
        if self._subject.is_probe:
            return self.obey(ProbeCommand.TERMINATE)
        for _ in range(0 if self._subject.is_endless else MOST_STEPS):
            done = self.step()
            if ended_lanes(done):
                return done
        self._subject.is_endless = True
        raise ClauseNotObservable(f"no episode has ended within {MOST_STEPS} steps")

    def observation(self, data: bytes) -> list[Column]:
        """Return the columns of a batched observation.

        Raises:
            ClauseBroken: ``data`` is no batch of observations.
        """
        spec = self._contract.observation_space
        try:
            return values.decode_batch(spec, data, self._contract.num_envs)
        except CodecError as error:
            raise ClauseBroken(f"an observation does not decode: {error}") from error

    def steps_of(self, done: ResetDone | StepDone) -> list[int]:
        counts: list[int] = np.ravel(np.asarray(self.part(done.observation, "steps"))).tolist()
        return counts

    def part(self, data: bytes, *path: str | int) -> Column:
        spec = self._contract.observation_space
        positions = [leaf.path for leaf in leaves(spec)]
        return self.observation(data)[positions.index(path)]


def ended_lanes(done: StepDone) -> list[int]:
    flags = zip(done.terminated, done.truncated, strict=True)
    return [lane for lane, (one, other) in enumerate(flags) if one or other]


def is_same(left: list[Column], right: list[Column]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(left, right, strict=True))


def _expect(response: EnvResponse, kind: type[ResponseT], request: str) -> ResponseT:
    if isinstance(response, kind):
        return response
    reason = ""
    if isinstance(response, EnvFailed):
        reason = f" ({response.code.name}: {response.message})"
    raise ClauseBroken(f"{request} is answered with {type(response).__name__}{reason}")
