"""ModelSubject: the model endpoint under test, and raw sessions with it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar
from uuid import uuid4

from rlmesh_ray.client.join_stream import JoinStream
from rlmesh_ray.compliance.action_cases import conforming
from rlmesh_ray.compliance.checks import Check, ClauseBroken, ClauseNotObservable, require
from rlmesh_ray.compliance.raw_session import RawSession, Subject, joined
from rlmesh_ray.errors import CodecError, ConformanceError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.handshake import HandshakeResponse
from rlmesh_ray.protocol.messages import (
    CloseModel,
    CloseRoute,
    ConfigureRoute,
    ModelErrorCode,
    ModelFailed,
    ModelRequest,
    ModelResponse,
    Predict,
    PredictContext,
    Predicted,
    PredictSlot,
    RouteConfigured,
)
from rlmesh_ray.spaces.batch import Column, leaves
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.validation import ValidationMode, check
from rlmesh_ray.wire.rlmesh_v1 import model as wire
from rlmesh_ray.wire.rlmesh_v1 import values

ROUTE = "check-route"
END_REMEDY = "allow it with --may-end-endpoint"
"""The option that allows checks which may end the endpoint."""


@dataclass
class ModelSubject(Subject):
    """A ModelService under test."""

    contract: EnvContract
    """Contract of an environment in which the policy can act; the handshake has none."""

    service: ClassVar[str] = "/rlmesh.model.v1.ModelService/"
    wire: ClassVar[Any] = wire

    @property
    def is_concurrent(self) -> bool:
        return capabilities.CONCURRENT_PREDICT in self.shake_hands().capabilities

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
        session_id = ""

        def parse(frame: bytes) -> HandshakeResponse:
            nonlocal session_id
            answer = wire.parse_handshake_response(frame)
            session_id = answer.capabilities.get(capabilities.SESSION, "")
            return answer

        with joined(
            self.connect_options, self.service, wire.pack_handshake_request(self.offer()), parse
        ) as stream:
            yield RawModelSession(self, stream, session_id or uuid4().hex)


MODEL: dict[str, Check[ModelSubject]] = {}
"""The checks of the service, which the modules of checks fill."""


class RawModelSession(RawSession[ModelRequest, ModelResponse]):
    """One Join stream of a ModelService.

    Args:
        subject: The endpoint.
        stream: The stream; not owned.
        session_id: Session id in every context: the server's, if it sent one.
    """

    def __init__(self, subject: ModelSubject, stream: JoinStream, session_id: str) -> None:
        super().__init__(stream, wire.pack_request, wire.parse_response, subject.answer_timeout_s)
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

    def close_request(self) -> CloseModel:
        return CloseModel(self.new_id())

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

    def refused(self, request: ModelRequest, why: str) -> ModelFailed:
        """Send a request that must fail, since ``why``; return the error."""
        response = self.ask(request)
        if not isinstance(response, ModelFailed):
            name = type(response).__name__
            raise ClauseBroken(
                f"{type(request).__name__} {why} is answered with {name}, not an error"
            )
        return response

    def must_be_unconfigured(self, request: ModelRequest, when: str) -> ModelFailed:
        """Send a request that must get NOT_CONFIGURED; return the error."""
        error = self.refused(request, when)
        require(
            error.code is ModelErrorCode.NOT_CONFIGURED,
            f"{type(request).__name__} {when} has code {error.code.name}, not NOT_CONFIGURED",
        )
        return error

    def actions(self, response: Predicted, num_slots: int, route_id: str = ROUTE) -> list[Column]:
        """Return the columns of the actions, one row for each slot.

        Raises:
            ClauseBroken: They are no such batch of the route's action space.
        """
        spec = self._contract(route_id).action_space
        try:
            columns = values.decode_batch(spec, response.action, num_slots)
            check(leaves(spec), columns, ValidationMode.OFF)
        except CodecError as error:
            raise ClauseBroken(f"actions for {num_slots} slots do not decode: {error}") from error
        except ConformanceError as error:
            raise ClauseBroken(f"an action is not of the route's space: {error}") from error
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
