"""EnvSubject and ModelSubject: the endpoint under test, and raw sessions with it."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar
from uuid import uuid4

import numpy as np
from google.protobuf.message import DecodeError

from rlmesh_ray import __version__
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.join_stream import JoinStream, open_call
from rlmesh_ray.compliance.action_cases import commands, conforming, is_probe, packed
from rlmesh_ray.compliance.checks import ClauseBroken, ClauseNotObservable, require
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
    is_shut_down: bool = field(default=False, init=False)
    """Whether a Shutdown has been accepted: the endpoint is gone then."""
    service: ClassVar[str]
    """``"env"`` or ``"model"``."""
    path: ClassVar[str]
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
        offered, text = {capabilities.SPACES_CORE: ""}, self.connect_options.text_sha256
        return replace(
            make_handshake_request("rlmesh-ray check", __version__, offered, text=text), **changes
        )

    def ask_shutdown(self) -> bool:
        request = self.wire.HANDSHAKE.pack_shutdown_request("rlmesh-ray check")
        reply = self._call("Shutdown", request)
        self.is_shut_down = self.wire.HANDSHAKE.parse_shutdown_response(reply).accepted
        return self.is_shut_down

    def raw_session(self) -> None:
        """Use a session in the usual way, and end it."""
        raise NotImplementedError

    @contextmanager
    def joined(self, *, is_bare: bool = False) -> Iterator[tuple[JoinStream, str]]:
        """Open a session as a conforming client does, or without its id (``is_bare``).

        Yields the stream, and the session id; empty where the server sends none.
        """
        connect_options = self.connect_options
        offer = self.wire.HANDSHAKE.pack_request(self.offer())
        with connect_options.open() as channel:
            reply = connect_options.call(channel, self.path + "Handshake", offer)
            answer = self.wire.HANDSHAKE.parse_response(reply)
            require(answer.compatible, f"our own handshake is refused: {answer.error_message!r}")
            session_id = answer.capabilities.get(capabilities.SESSION, "")
            has_id = bool(session_id) and not is_bare
            own = ((capabilities.SESSION_METADATA_KEY, session_id),) if has_id else ()
            call = open_call(channel, self.path + "Join", connect_options.metadata + own)
            stream = JoinStream(call, connect_options.address)
            try:
                yield stream, session_id
            finally:
                stream.close()

    def _handshake(self, changes: Mapping[str, Any]) -> bytes:
        return self._call("Handshake", self.wire.HANDSHAKE.pack_request(self.offer(**changes)))

    def _call(self, method: str, data: bytes) -> bytes:
        with self.connect_options.open() as channel:
            return self.connect_options.call(channel, self.path + method, data)


class RawSession(Generic[RequestT, ResponseT, FailedT]):
    """One Join stream, which is not owned."""

    failed: type[FailedT]
    """The service's error."""

    def __init__(self, stream: JoinStream, subject: Subject) -> None:
        self._stream = stream
        self.timeout_s = subject.answer_timeout_s
        """Timeout of each response."""
        self._wire = subject.wire
        self._ids = (f"check-{number}" for number in itertools.count(1))
        self.has_ended = False
        """Whether ``until_end`` has seen the end of the stream."""
        self.last_frame = b""
        """The last received frame."""

    def new_id(self) -> str:
        return next(self._ids)

    def send(self, *requests: RequestT) -> None:
        for request in requests:
            self._stream.send(self._wire.pack_request(request))

    def send_frame(self, frame: bytes) -> None:
        self._stream.send(frame)

    def receive(self) -> ResponseT:
        """Return the next response; raises EndpointError where none comes in time."""
        self.last_frame = self._stream.receive(self.timeout_s)
        try:
            response: ResponseT = self._wire.parse_response(self.last_frame)
        except CodecError as error:
            raise ClauseBroken(f"a frame is not a response: {error}") from error
        return response

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


KindT = TypeVar("KindT", bound=Response)


def expect(response: Response, kind: type[KindT], request: str) -> KindT:
    if isinstance(response, kind):
        return response
    reason = ""
    if isinstance(response, EnvFailed):
        reason = f" ({response.code.name}: {response.message})"
    raise ClauseBroken(f"{request} is answered with {type(response).__name__}{reason}")


def require_one_response_each(sent: Sequence[str], received: Sequence[str]) -> None:
    """Require that the responses have the ids of the requests, each once, in any order."""
    counts = Counter(received)
    strange = {key: counts[key] for key in (*sent, *counts) if counts[key] != 1 or key not in sent}
    require(not strange, f"responses by request_id, where there is not exactly one: {strange}")


MOST_STEPS = 1000
"""Most steps in which a check waits for an episode to end by itself."""


@dataclass
class EnvSubject(Subject):
    validation: ValidationMode = ValidationMode.WARN
    """The server's validation policy, as the operator states it."""
    is_endless: bool = field(default=False, init=False)
    """Whether no episode ended within ``MOST_STEPS``; the next check need not wait again."""

    service: ClassVar[str] = "env"
    path: ClassVar[str] = "/rlmesh.env.v1.EnvService/"
    wire: ClassVar[Any] = env_wire

    @cached_property
    def contract(self) -> EnvContract:
        answer = self.shake_hands()
        require(answer.compatible, f"our own handshake is refused: {answer.error_message!r}")
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
        """Return the contract of the probe; raise ClauseNotObservable for other environments."""
        if not self.is_probe:
            raise ClauseNotObservable("needs the probe environment, which executes commands")
        return self.contract

    def raw_session(self) -> None:
        with self.after_reset() as session:
            session.step()

    @contextmanager
    def session(self, *, is_bare: bool = False) -> "Iterator[RawEnvSession]":
        """Open a session, see ``joined``; close it at the end."""
        with self.joined(is_bare=is_bare) as (stream, _):
            session = RawEnvSession(stream, self)
            try:
                yield session
            finally:
                # Also after a failure: the server may have one place only. Only the checks of
                # Close look at the response.
                session.timeout_s = min(session.timeout_s, _LEAVE_TIMEOUT_S)
                with suppress(EndpointError, ClauseBroken):
                    if not session.has_ended:
                        session.send(Close(session.new_id()))
                        session.until_end()

    @contextmanager
    def after_reset(self) -> "Iterator[RawEnvSession]":
        with self.session() as session:
            session.reset()
            yield session

    def probe_after_reset(self) -> "AbstractContextManager[RawEnvSession]":
        self.probe()
        return self.after_reset()

    def refused(self, action: bytes, why: str) -> EnvFailed:
        """Return the error of a session's first Step, which must fail; messages tell ``why``."""
        with self.after_reset() as session:
            return session.refused(session.step_request(action), why)

    def command(self, *by_lane: ProbeCommand, **parts: Any) -> bytes:
        """Return the probe's action with one command for each lane; further lanes get GO_ON."""
        idle = [ProbeCommand.GO_ON] * (self.contract.num_envs - len(by_lane))
        return packed(self.contract, commands(*by_lane, *idle, **parts))


class RawEnvSession(RawSession[EnvRequest, EnvResponse, EnvFailed]):
    failed = EnvFailed

    def __init__(self, stream: JoinStream, subject: EnvSubject) -> None:
        super().__init__(stream, subject)
        self.subject = subject
        self._contract = subject.contract

    def reset(self, **fields: Any) -> ResetDone:
        return expect(self.ask(Reset(self.new_id(), **fields)), ResetDone, "Reset")

    def step(self, action: bytes | None = None) -> StepDone:
        """Step with ``action``; by default one that lies within the action space."""
        done = expect(self.ask(self.step_request(action)), StepDone, "Step")
        lanes = self._contract.num_envs
        for name in ("rewards", "terminated", "truncated"):
            count = len(getattr(done, name))
            require(count == lanes, f"{name} has {count} entries for {lanes} lanes")
        for record in done.completed_episodes:
            is_lane = 0 <= record.env_index < lanes
            require(is_lane, f"a record is for lane {record.env_index} of {lanes}")
        return done

    def step_request(self, action: bytes | None = None) -> Step:
        return Step(self.new_id(), packed(self._contract) if action is None else action)

    def step_on(self) -> StepDone:
        """Step as ``step`` does; raise ClauseNotObservable if an episode ends."""
        done = self.step()
        if ended_lanes(done):
            raise ClauseNotObservable("an episode ends with its first step")
        return done

    def obey(self, *by_lane: ProbeCommand, **parts: Any) -> StepDone:
        return self.step(self.subject.command(*by_lane, **parts))

    def command_reset(self, command: ProbeCommand, **fields: Any) -> Reset:
        return Reset(self.new_id(), options={"command": int(command)}, **fields)

    def close(self) -> Closed:
        return expect(self.ask(Close(self.new_id())), Closed, "Close")

    def until_episode_ends(self) -> StepDone:
        if self.subject.is_probe:
            return self.obey(ProbeCommand.TERMINATE)
        for _ in range(0 if self.subject.is_endless else MOST_STEPS):
            done = self.step()
            if ended_lanes(done):
                return done
        self.subject.is_endless = True
        raise ClauseNotObservable(f"no episode has ended within {MOST_STEPS} steps")

    def observation(self, data: bytes) -> list[Column]:
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


ROUTE = "check-route"
END_REMEDY = "allow it with --may-end-endpoint"
"""The option that allows checks which may end the endpoint."""


@dataclass
class ModelSubject(Subject):
    contract: EnvContract
    """Contract of an environment in which the policy can act; the handshake has none."""
    policy_problem: str | None = field(default=None, init=False)
    """Why the policy cannot act there; empty where it can, None as long as that is not known."""

    service: ClassVar[str] = "model"
    path: ClassVar[str] = "/rlmesh.model.v1.ModelService/"
    wire: ClassVar[Any] = model_wire

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
        """Open a session for predictions; raise ClauseNotObservable if the policy cannot act."""
        # Found out once: every check that needs a prediction would fail for this reason, which is
        # not the server's fault.
        if self.policy_problem is None:
            self.policy_problem = self._policy_problem()
        if self.policy_problem:
            raise ClauseNotObservable(self.policy_problem)
        with self.session() as session:
            yield session

    def _policy_problem(self) -> str:
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

    @contextmanager
    def session(self) -> "Iterator[RawModelSession]":
        """Open a session as a conforming runtime does.

        It ends without Close, which may end the whole server.
        """
        with self.joined() as (stream, session_id):
            yield RawModelSession(stream, self, session_id or uuid4().hex)


class RawModelSession(RawSession[ModelRequest, ModelResponse, ModelFailed]):
    """One Join stream of a ModelService, with the session id of every context."""

    failed = ModelFailed

    def __init__(self, stream: JoinStream, subject: ModelSubject, session_id: str) -> None:
        super().__init__(stream, subject)
        self._subject = subject
        self._session_id = session_id
        self._contracts: dict[str, EnvContract] = {}

    def configure_request(
        self, route_id: str = ROUTE, contract: EnvContract | None = None
    ) -> ConfigureRoute:
        """Return a ConfigureRoute, by default of the subject's contract; later requests use it."""
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
        """Return a Predict.

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
        """Open a route; raise ClauseNotObservable if the policy cannot act in its environment."""
        response = self.ask(self.configure_request(route_id, contract))
        if isinstance(response, ModelFailed):
            refused = self._contracts.pop(route_id)
            raise ClauseNotObservable(
                f"the policy refuses {refused.id} with {refused.num_envs} lanes "
                f"({response.code.name}: {response.message})"
            )
        expect(response, RouteConfigured, "ConfigureRoute")

    def predict(self, request: Predict | None = None) -> Predicted:
        response = self.ask(request or self.predict_request())
        if isinstance(response, ModelFailed):
            raise ClauseBroken(f"Predict fails ({response.code.name}: {response.message})")
        return expect(response, Predicted, "Predict")

    def must_be_unconfigured(self, request: ModelRequest, when: str) -> ModelFailed:
        error = self.refused(request, when)
        require(
            error.code is ModelErrorCode.NOT_CONFIGURED,
            f"{type(request).__name__} {when} has code {error.code.name}, not NOT_CONFIGURED",
        )
        return error

    def actions(self, response: Predicted, num_slots: int, route_id: str = ROUTE) -> list[Column]:
        """Return the columns of the actions: for each slot one of the route's space."""
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
    return PredictSlot(lane, episode or f"episode-{lane}", step, step == 0)
