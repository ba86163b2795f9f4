"""EnvSubject and ModelSubject: the endpoint under test, and raw sessions with it."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar
from uuid import uuid4

import numpy as np
from google.protobuf.message import DecodeError

from rlmesh_ray import __version__
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.join_stream import JoinStream, open_call
from rlmesh_ray.compliance.action_cases import commands, conforming, is_probe, packed_rest
from rlmesh_ray.compliance.checks import Check, ClauseBroken, ClauseNotObservable, require
from rlmesh_ray.compliance.probe import ProbeCommand
from rlmesh_ray.errors import CodecError, ConformanceError, EndpointError, EndpointLostError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.handshake import (
    HandshakeRequest,
    HandshakeResponse,
    make_handshake_request,
)
from rlmesh_ray.protocol.messages import (
    Close,
    Closed,
    CloseRoute,
    ConfigureRoute,
    EnvFailed,
    EnvRequest,
    EnvResponse,
    ModelErrorCode,
    ModelFailed,
    ModelRequest,
    ModelResponse,
    Predict,
    PredictContext,
    Predicted,
    PredictSlot,
    Request,
    Reset,
    ResetDone,
    Response,
    RouteConfigured,
    Step,
    StepDone,
)
from rlmesh_ray.spaces.batch import Column, leaves
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.validation import Checker, ValidationMode
from rlmesh_ray.wire._pb.rlmesh.env.v1 import service_pb2 as pb
from rlmesh_ray.wire.rlmesh_v1 import env as env_wire
from rlmesh_ray.wire.rlmesh_v1 import model as model_wire
from rlmesh_ray.wire.rlmesh_v1 import values

_LEAVE_TIMEOUT_S = 10.0

RequestT = TypeVar("RequestT", bound=Request)
ResponseT = TypeVar("ResponseT", bound=Response)
FailedT = TypeVar("FailedT", EnvFailed, ModelFailed)


@dataclass
class Subject:
    """An endpoint under test: its handshakes, Shutdown and Join streams."""

    connect_options: ConnectOptions
    may_ask_shutdown: bool = field(default=False, kw_only=True)
    """Whether Shutdown, and to a model also Close, may be sent; either may end the server."""
    answer_timeout_s: float = field(default=60.0, kw_only=True)
    """Timeout of each response; longer than any deadline that a check sets."""
    offered: Mapping[str, str] = field(
        default_factory=lambda: {capabilities.SPACES_CORE: ""}, kw_only=True
    )
    """Capabilities of the sessions' handshakes."""
    is_shut_down: bool = field(default=False, init=False)
    """Whether a Shutdown has been accepted: the endpoint is gone then."""
    service: ClassVar[str]
    """Path of the service, with both slashes."""
    wire: ClassVar[Any]
    """Module with the frames of the service."""

    def shake_hands(self, **changes: Any) -> HandshakeResponse:
        answer: HandshakeResponse = self.wire.HANDSHAKE.parse_response(self._handshake(changes))
        return answer

    def has_contract(self, **changes: Any) -> bool:
        """Return whether the answer to such an offer has field 6, a contract, even in a refusal."""
        try:
            reply = pb.HandshakeResponse.FromString(self._handshake(changes))
        except DecodeError as error:
            raise ClauseBroken(f"the answer to the handshake does not decode: {error}") from error
        return reply.HasField("env_contract")

    def offer(self, **changes: Any) -> HandshakeRequest:
        own = make_handshake_request(
            "rlmesh-ray check", __version__, self.offered, text=self.connect_options.text_sha256
        )
        return replace(own, **changes)

    def ask_shutdown(self) -> tuple[bool, str]:
        reply = self._call(
            "Shutdown", self.wire.HANDSHAKE.pack_shutdown_request("rlmesh-ray check")
        )
        response = self.wire.HANDSHAKE.parse_shutdown_response(reply)
        self.is_shut_down = response.accepted
        return response.accepted, response.message

    def raw_session(self) -> None:
        raise NotImplementedError

    @contextmanager
    def joined(self, *, is_bare: bool = False) -> Iterator[tuple[JoinStream, str]]:
        """Open a session as a conforming client does; the stream is cancelled at the end.

        Args:
            is_bare: Whether to omit the session id of the handshake.

        Yields:
            The stream, and the session id; empty where the server sends none.

        Raises:
            ClauseBroken: The handshake is refused.
        """
        connect_options = self.connect_options
        offer = self.wire.HANDSHAKE.pack_request(self.offer())
        with connect_options.open() as channel:
            reply = connect_options.call(channel, self.service + "Handshake", offer)
            answer = self.wire.HANDSHAKE.parse_response(reply)
            require(answer.compatible, f"our own handshake is refused: {answer.error_message!r}")
            session_id = answer.capabilities.get(capabilities.SESSION, "")
            has_id = bool(session_id) and not is_bare
            own = ((capabilities.SESSION_METADATA_KEY, session_id),) if has_id else ()
            call = open_call(channel, self.service + "Join", connect_options.metadata + own)
            stream = JoinStream(call, connect_options.address)
            try:
                yield stream, session_id
            finally:
                stream.close()

    def _handshake(self, changes: Mapping[str, Any]) -> bytes:
        return self._call("Handshake", self.wire.HANDSHAKE.pack_request(self.offer(**changes)))

    def _call(self, method: str, data: bytes) -> bytes:
        """Make a unary call on a new connection; raises EndpointError if it fails."""
        with self.connect_options.open() as channel:
            return self.connect_options.call(channel, self.service + method, data)


class RawSession(Generic[RequestT, ResponseT, FailedT]):
    """One Join stream.

    Args:
        stream: The stream; not owned.
        subject: The endpoint.
    """

    failed: type[FailedT]
    """The service's error."""

    def __init__(self, stream: JoinStream, subject: Subject) -> None:
        self._stream = stream
        self._timeout_s = subject.answer_timeout_s
        self._wire = subject.wire
        self._ids = (f"check-{number}" for number in itertools.count(1))
        self.has_ended = False
        """Whether the end of the stream has been seen."""
        self.last_frame = b""
        """The last received frame."""

    def new_id(self) -> str:
        return next(self._ids)

    def send(self, request: RequestT) -> None:
        self._stream.send(self._wire.pack_request(request))

    def send_frame(self, frame: bytes) -> None:
        self._stream.send(frame)

    def receive(self) -> ResponseT:
        """Return the next response.

        Raises:
            EndpointError: There was none in time, or the stream ended.
            ClauseBroken: The frame is not a response.
        """
        self.last_frame = self._stream.receive(self._timeout_s)
        try:
            response: ResponseT = self._wire.parse_response(self.last_frame)
        except CodecError as error:
            raise ClauseBroken(f"a frame is not a response: {error}") from error
        return response

    def leave(self, close: RequestT) -> None:
        """Send ``close`` and wait for the end of the stream; responses are ignored."""
        self._timeout_s = min(self._timeout_s, _LEAVE_TIMEOUT_S)
        with suppress(EndpointError, ClauseBroken):
            if not self.has_ended:
                self.send(close)
                self.until_end()

    def until_end(self) -> list[ResponseT]:
        responses = []
        try:
            while True:
                responses.append(self.receive())
        except EndpointLostError as error:
            self.has_ended = True
            # A stream that breaks has gRPC's error as the cause, one that ends has none.
            if error.__cause__ is not None:
                raise
            return responses

    def ask(self, request: RequestT) -> ResponseT:
        """Send ``request``; return the next response, which must be the one to it."""
        self.send(request)
        response = self.receive()
        require(
            response.request_id == request.request_id,
            f"the response to {type(request).__name__} has request_id {response.request_id!r}, "
            f"not {request.request_id!r}",
        )
        return response

    def refused(self, request: RequestT, why: str) -> FailedT:
        """Send a request that must fail, since ``why``; return the error."""
        response = self.ask(request)
        if not isinstance(response, self.failed):
            name = type(response).__name__
            raise ClauseBroken(
                f"{type(request).__name__} {why} is answered with {name}, not an error"
            )
        return response


MOST_STEPS = 1000
"""Most steps in which a check waits for an episode to end by itself."""

KindT = TypeVar("KindT", ResetDone, StepDone, Closed)


@dataclass
class EnvSubject(Subject):
    """An EnvService under test; its sessions are opened one at a time."""

    validation: ValidationMode = ValidationMode.WARN
    """The server's validation policy, as the operator states it."""
    is_endless: bool = field(default=False, init=False)
    """Whether no episode ended within ``MOST_STEPS``; the next check need not wait again."""

    service: ClassVar[str] = "/rlmesh.env.v1.EnvService/"
    wire: ClassVar[Any] = env_wire

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
        with self.joined(is_bare=is_bare) as (stream, _):
            session = RawEnvSession(stream, self)
            try:
                yield session
            finally:
                # Also after a failure: the server may have one place only. Only the checks of
                # Close look at the response.
                session.leave(Close(session.new_id()))


ENV: dict[str, Check[EnvSubject]] = {}
"""The checks of the service, which the modules of checks fill."""


class RawEnvSession(RawSession[EnvRequest, EnvResponse, EnvFailed]):
    """One Join stream of an EnvService.

    Args:
        stream: The stream; not owned.
        subject: The endpoint.
    """

    failed = EnvFailed

    def __init__(self, stream: JoinStream, subject: EnvSubject) -> None:
        super().__init__(stream, subject)
        self._subject = subject
        self._contract = subject.contract

    def reset(self, **fields: Any) -> ResetDone:
        return _expect(self.ask(Reset(self.new_id(), **fields)), ResetDone, "Reset")

    def step(self, action: bytes | None = None) -> StepDone:
        """Step with ``action``; by default one that lies within the action space.

        Raises:
            ClauseBroken: The response is not a StepResponse, or has another number of lanes.
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
            raise ClauseNotObservable("an episode ends with its first step")
        return done

    def obey(self, *by_lane: ProbeCommand, **parts: Any) -> StepDone:
        """Step the probe with one command for each lane; further lanes get GO_ON."""
        return self.step(self.command(*by_lane, **parts))

    def command(self, *by_lane: ProbeCommand, **parts: Any) -> bytes:
        idle = [ProbeCommand.GO_ON] * (self._contract.num_envs - len(by_lane))
        columns = commands(*by_lane, *idle, **parts)
        return values.encode_batch(self._contract.action_space, columns, self._contract.num_envs)

    def close(self) -> Closed:
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
            ClauseBroken: ``data`` is not a batch of observations.
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


def _expect(response: EnvResponse, kind: type[KindT], request: str) -> KindT:
    if isinstance(response, kind):
        return response
    reason = ""
    if isinstance(response, EnvFailed):
        reason = f" ({response.code.name}: {response.message})"
    raise ClauseBroken(f"{request} is answered with {type(response).__name__}{reason}")


ROUTE = "check-route"
END_REMEDY = "allow it with --may-end-endpoint"
"""The option that allows checks which may end the endpoint."""


@dataclass
class ModelSubject(Subject):
    """A ModelService under test."""

    contract: EnvContract
    """Contract of an environment in which the policy can act; the handshake has none."""

    service: ClassVar[str] = "/rlmesh.model.v1.ModelService/"
    wire: ClassVar[Any] = model_wire

    @cached_property
    def policy_problem(self) -> str:
        """Why the policy cannot act in the contract's environment; empty where it can.

        Cached: every check that needs a prediction would fail for this reason, which is not the
        server's fault.
        """
        with self.session() as session:
            response = session.ask(session.configure_request())
            if isinstance(response, RouteConfigured):
                response = session.ask(session.predict_request())
        # NOT_CONFIGURED on a configured route is an error of the server, not of the policy.
        if not isinstance(response, ModelFailed) or response.code is ModelErrorCode.NOT_CONFIGURED:
            return ""
        return (
            f"the policy cannot act in {self.contract.id}; name an environment that it was made "
            f"for with --env ({response.code.name}: {response.message})"
        )

    @property
    def known_policy_problem(self) -> str | None:
        """The ``policy_problem``; None where it has not been determined."""
        return self.__dict__.get("policy_problem") or None

    @property
    def wide_contract(self) -> EnvContract:
        """The contract with at least two lanes, as checks of order need it."""
        return replace(self.contract, num_envs=max(self.contract.num_envs, 2))

    def raw_session(self) -> None:
        with self.acting() as session:
            session.configure()
            session.predict()

    @contextmanager
    def acting(self) -> "Iterator[RawModelSession]":
        """Open a session for predictions.

        Raises:
            ClauseNotObservable: The policy cannot act in the contract's environment.
        """
        if self.policy_problem:
            raise ClauseNotObservable(self.policy_problem)
        with self.session() as session:
            yield session

    @contextmanager
    def session(self) -> "Iterator[RawModelSession]":
        """Open a session as a conforming runtime does.

        It ends without Close, which may end the whole server.
        """
        with self.joined() as (stream, session_id):
            yield RawModelSession(self, stream, session_id or uuid4().hex)


MODEL: dict[str, Check[ModelSubject]] = {}
"""The checks of the service, which the modules of checks fill."""


class RawModelSession(RawSession[ModelRequest, ModelResponse, ModelFailed]):
    """One Join stream of a ModelService.

    Args:
        subject: The endpoint.
        stream: The stream; not owned.
        session_id: Session id in every context: the server's, if it sent one.
    """

    failed = ModelFailed

    def __init__(self, subject: ModelSubject, stream: JoinStream, session_id: str) -> None:
        super().__init__(stream, subject)
        self._subject = subject
        self._session_id = session_id
        self._contracts: dict[str, EnvContract] = {}

    def configure_request(
        self, route_id: str = ROUTE, contract: EnvContract | None = None
    ) -> ConfigureRoute:
        """Return a ConfigureRoute that has not been sent; later requests use its contract.

        Args:
            route_id: The route.
            contract: Contract of the route; default: the subject's.
        """
        self._contracts[route_id] = self._subject.contract if contract is None else contract
        request_id = self.new_id()
        return ConfigureRoute(
            request_id, self._context(route_id, request_id), self._contracts[route_id]
        )

    def predict_request(
        self,
        route_id: str = ROUTE,
        *,
        slots: Sequence[PredictSlot] | None = None,
        step: int = 0,
        columns: list[Column] | None = None,
    ) -> Predict:
        """Return a Predict that has not been sent.

        Args:
            route_id: The route.
            slots: One for each row; default: one for each lane, at ``step``.
            step: Step of the default slots' episodes; 0 is the first.
            columns: Columns of the observations, one row for each slot; default: equal rows.
        """
        contract = self._contract(route_id)
        if slots is None:
            slots = [slot(lane, step) for lane in range(contract.num_envs)]
        spec = contract.observation_space
        if columns is None:
            columns = conforming(spec, len(slots))
        data = values.encode_batch(spec, columns, len(slots))
        request_id = self.new_id()
        return Predict(request_id, self._context(route_id, request_id, tuple(slots)), data)

    def close_route_request(self, route_id: str = ROUTE) -> CloseRoute:
        request_id = self.new_id()
        return CloseRoute(request_id, self._context(route_id, request_id))

    def configure(self, route_id: str = ROUTE, contract: EnvContract | None = None) -> None:
        """Open a route; by default with the subject's contract.

        Raises:
            ClauseNotObservable: The policy cannot act in this environment.
        """
        response = self.ask(self.configure_request(route_id, contract))
        if isinstance(response, ModelFailed):
            refused = self._contracts.pop(route_id)
            raise ClauseNotObservable(
                f"the policy refuses {refused.id} with {refused.num_envs} lanes "
                f"({response.code.name}: {response.message})"
            )
        if not isinstance(response, RouteConfigured):
            raise ClauseBroken(f"ConfigureRoute is answered with {type(response).__name__}")

    def predict(self, request: Predict | None = None) -> Predicted:
        """Send a Predict, by default for every lane; return the response."""
        response = self.ask(request or self.predict_request())
        if isinstance(response, ModelFailed):
            raise ClauseBroken(f"Predict fails ({response.code.name}: {response.message})")
        if not isinstance(response, Predicted):
            raise ClauseBroken(f"Predict is answered with {type(response).__name__}")
        return response

    def must_be_unconfigured(self, request: ModelRequest, when: str) -> ModelFailed:
        error = self.refused(request, when)
        require(
            error.code is ModelErrorCode.NOT_CONFIGURED,
            f"{type(request).__name__} {when} has code {error.code.name}, not NOT_CONFIGURED",
        )
        return error

    def actions(self, response: Predicted, num_slots: int, route_id: str = ROUTE) -> list[Column]:
        """Return the columns of the actions, one row for each slot.

        Raises:
            ClauseBroken: They are not such a batch of the route's action space.
        """
        spec = self._contract(route_id).action_space
        try:
            columns = values.decode_batch(spec, response.action, num_slots)
            Checker(leaves(spec), ValidationMode.OFF).check(columns)
        except CodecError as error:
            raise ClauseBroken(f"actions for {num_slots} slots do not decode: {error}") from error
        except ConformanceError as error:
            raise ClauseBroken(f"an action is not in the route's space: {error}") from error
        return columns

    def _contract(self, route_id: str) -> EnvContract:
        return self._contracts.get(route_id, self._subject.contract)

    def _context(
        self, route_id: str, request_id: str, slots: tuple[PredictSlot, ...] = ()
    ) -> PredictContext:
        return PredictContext(self._session_id, route_id, request_id, slots)


def slot(lane: int, step: int = 0, episode: str = "") -> PredictSlot:
    """Return the slot of a row; by default of its lane's default episode."""
    return PredictSlot(lane, episode or f"episode-{lane}", step, step == 0)
