"""The env endpoint under test: raw conversations with it, one request at a time or many."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from rlmesh_ray import __version__
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.join_stream import JoinStream
from rlmesh_ray.compliance.action_cases import commands, is_probe, packed_rest
from rlmesh_ray.compliance.findings import ClauseBroken, ClauseNotObservable, require
from rlmesh_ray.compliance.probe import ProbeCommand
from rlmesh_ray.compliance.raw_session import RawSession, call_once, joined
from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.handshake import (
    HandshakeRequest,
    HandshakeResponse,
    make_handshake_request,
)
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
from rlmesh_ray.spaces.conformance import ValidationMode
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.wire._pb.rlmesh.env.v1 import service_pb2 as pb
from rlmesh_ray.wire.rlmesh_v1 import env as wire
from rlmesh_ray.wire.rlmesh_v1 import values

SERVICE = "/rlmesh.env.v1.EnvService/"
HANDSHAKE = SERVICE + "Handshake"
MOST_STEPS = 1000
"""How long a check waits for an episode to end by itself."""

ResponseT = TypeVar("ResponseT", ResetDone, StepDone, Rendered, Closed, EnvFailed)


@dataclass
class EnvSubject:
    """An EnvService at some address.

    Every conversation is a session of its own, and one at a time.
    """

    connect_options: ConnectOptions
    validation: ValidationMode = ValidationMode.WARN
    """What the operator says about the server's policy on values out of range."""
    may_ask_shutdown: bool = False
    """Whether Shutdown may be sent; a server that accepts it is gone."""
    answer_timeout_s: float = 60.0
    """How long any answer may take; a check sets no deadline beyond it."""
    offered: Mapping[str, str] = field(default_factory=lambda: {capabilities.SPACES_CORE: ""})
    """Capabilities of the sessions' handshakes."""
    is_endless: bool = field(default=False, init=False)
    """Whether no episode has ended in a long time; the next check need not wait again."""

    def shake_hands(self, **changes: Any) -> HandshakeResponse:
        """Return the answer to a handshake that differs from ours by ``changes``."""
        return wire.parse_handshake_response(
            call_once(
                self.connect_options, HANDSHAKE, wire.pack_handshake_request(self.offer(**changes))
            )
        )

    def has_contract(self, **changes: Any) -> bool:
        """Tell whether the answer to such a handshake has a contract, even if it is refused."""
        reply = call_once(
            self.connect_options, HANDSHAKE, wire.pack_handshake_request(self.offer(**changes))
        )
        try:
            return pb.HandshakeResponse.FromString(reply).HasField("env_contract")
        except DecodeError as error:
            raise ClauseBroken(f"the answer to the handshake does not decode: {error}") from error

    def offer(self, **changes: Any) -> HandshakeRequest:
        """Return our own offer with ``changes``."""
        own = make_handshake_request(
            "rlmesh-ray check", __version__, self.offered, text=self.connect_options.text_sha256
        )
        return replace(own, **changes)

    @cached_property
    def contract(self) -> EnvContract:
        """What the endpoint promises.

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
        """Whether the environment obeys commands."""
        return is_probe(self.contract)

    @property
    def may_step_after_end(self) -> bool:
        """Whether a Step after the end of an episode is known to be no error."""
        return self.is_probe or self.contract.autoreset_mode is AutoresetMode.NEXT_STEP

    def probe(self) -> EnvContract:
        """Return the contract if the environment is the probe.

        Raises:
            ClauseNotObservable: It is another.
        """
        if not self.is_probe:
            raise ClauseNotObservable("needs the probe environment, which does what it is told to")
        return self.contract

    def ask_shutdown(self) -> tuple[bool, str]:
        """Send Shutdown; return whether it was accepted, and the message."""
        reply = call_once(
            self.connect_options,
            SERVICE + "Shutdown",
            wire.pack_shutdown_request("rlmesh-ray check"),
        )
        response = wire.parse_shutdown_response(reply)
        return response.accepted, response.message

    def raw_session(self) -> None:
        """Open a session, step once, close it."""
        with self.session() as session:
            session.reset()
            session.step()

    @contextmanager
    def session(self, *, is_bare: bool = False) -> "Iterator[RawEnvSession]":
        """Open a session as a conforming client does; close it at the end.

        Args:
            is_bare: Whether the session id of the handshake is kept back.
        """
        offer = wire.pack_handshake_request(self.offer())
        with joined(
            self.connect_options, SERVICE, offer, wire.parse_handshake_response, is_bare=is_bare
        ) as stream:
            conversation = RawEnvSession(stream, self)
            try:
                yield conversation
            finally:
                # Also after a failure: the server may have one place only. How it closes is
                # looked at where Close is what is checked.
                conversation.leave(Close(conversation.new_id()))


class RawEnvSession(RawSession[EnvRequest, EnvResponse]):
    """One Join stream of an EnvService.

    Args:
        stream: Used, not owned.
        subject: The endpoint.
    """

    def __init__(self, stream: JoinStream, subject: EnvSubject) -> None:
        super().__init__(stream, wire.pack_request, wire.parse_response, subject.answer_timeout_s)
        self._subject = subject
        self._contract = subject.contract

    def reset(self, **fields: Any) -> ResetDone:
        """Reset; ``fields`` are those of the request."""
        return _expect(self.ask(Reset(self.new_id(), **fields)), ResetDone, "Reset")

    def step(self, action: bytes | None = None) -> StepDone:
        """Step with ``action``; by default one that lies within the action space.

        Raises:
            ClauseBroken: The response is none to a Step, or not about this session's lanes.
        """
        done = _expect(self.ask(self.step_request(action)), StepDone, "Step")
        lanes = self._contract.num_envs
        for name in ("rewards", "terminated", "truncated"):
            count = len(getattr(done, name))
            require(count == lanes, f"{name} has {count} entries for {lanes} lanes")
        for record in done.completed_episodes:
            is_there = 0 <= record.env_index < lanes
            require(is_there, f"a record is for lane {record.env_index} of {lanes}")
        return done

    def step_request(self, action: bytes | None = None) -> Step:
        """Return a Step that has not been sent."""
        return Step(self.new_id(), packed_rest(self._contract) if action is None else action)

    def step_on(self) -> StepDone:
        """Step as ``step`` does, without an end.

        Raises:
            ClauseNotObservable: An episode ends.
        """
        done = self.step()
        if ended_lanes(done):
            raise ClauseNotObservable("episodes end at once")
        return done

    def obey(self, *by_lane: ProbeCommand, **parts: Any) -> StepDone:
        """Step the probe, one command a lane; lanes that are not named go on."""
        return self.step(self.command(*by_lane, **parts))

    def command(self, *by_lane: ProbeCommand, **parts: Any) -> bytes:
        """Return an action of the probe."""
        idle = [ProbeCommand.GO_ON] * (self._contract.num_envs - len(by_lane))
        columns = commands(*by_lane, *idle, **parts)
        return values.encode_batch(self._contract.action_space, columns, self._contract.num_envs)

    def refused(self, request: EnvRequest, why: str) -> EnvFailed:
        """Return the error that ``request`` must get, because of ``why``."""
        response = self.ask(request)
        if not isinstance(response, EnvFailed):
            name = type(response).__name__
            raise ClauseBroken(
                f"{type(request).__name__} {why} is answered with {name}, not an error"
            )
        return response

    def close(self) -> Closed:
        """Close, and return the answer."""
        return _expect(self.ask(Close(self.new_id())), Closed, "Close")

    def until_episode_ends(self) -> StepDone:
        """Step until a lane's episode has ended; return that step.

        Raises:
            ClauseNotObservable: None ends.
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
            ClauseBroken: ``data`` is none.
        """
        spec = self._contract.observation_space
        try:
            return values.decode_batch(spec, data, self._contract.num_envs)
        except CodecError as error:
            raise ClauseBroken(f"an observation does not decode: {error}") from error

    def steps_of(self, done: ResetDone | StepDone) -> list[int]:
        """Return how many steps each lane of the probe has done."""
        counts: list[int] = np.ravel(np.asarray(self.part(done.observation, "steps"))).tolist()
        return counts

    def part(self, data: bytes, *path: str | int) -> Column:
        """Return one column of an observation of the probe."""
        spec = self._contract.observation_space
        positions = [leaf.path for leaf in leaves(spec)]
        return self.observation(data)[positions.index(path)]


def ended_lanes(done: StepDone) -> list[int]:
    """Return the lanes whose episodes ``done`` reports as ended."""
    flags = zip(done.terminated, done.truncated, strict=True)
    return [lane for lane, (one, other) in enumerate(flags) if one or other]


def is_same(left: list[Column], right: list[Column]) -> bool:
    """Tell whether two batches hold the same values."""
    return all(np.array_equal(one, other) for one, other in zip(left, right, strict=True))


def _expect(response: EnvResponse, kind: type[ResponseT], request: str) -> ResponseT:
    if isinstance(response, kind):
        return response
    says = ""
    if isinstance(response, EnvFailed):
        says = f" ({response.code.name}: {response.message})"
    raise ClauseBroken(f"{request} is answered with {type(response).__name__}{says}")
