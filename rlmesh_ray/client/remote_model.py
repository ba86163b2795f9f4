"""RemoteModel: a served policy, from anywhere."""

import contextlib
import itertools
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
import gymnasium

from rlmesh_ray import __version__
from rlmesh_ray.client.channel import ClientTls, Dial, handshake_with
from rlmesh_ray.client.join_stream import JoinStream
from rlmesh_ray.errors import (
    CodecError,
    EndpointClosedError,
    EndpointError,
    EndpointLostError,
    EndpointTimeoutError,
    LocalProtocolError,
    RemoteModelError,
    RlmeshError,
)
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.handshake import Answer, check_answer, make_offer
from rlmesh_ray.protocol.messages import (
    BatchRun,
    CloseModel,
    CloseRoute,
    ConfigureRoute,
    ModelFailed,
    ModelRequest,
    ModelResponse,
    Predict,
    PredictContext,
    Predicted,
    PredictSlot,
)
from rlmesh_ray.spaces.batch import unflatten
from rlmesh_ray.spaces.conformance import coerce_batch
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym import from_gymnasium
from rlmesh_ray.wire.rlmesh_v1 import model as wire
from rlmesh_ray.wire.rlmesh_v1 import values

_HANDSHAKE = "/rlmesh.model.v1.ModelService/Handshake"
_JOIN = "/rlmesh.model.v1.ModelService/Join"
_CLOSE_TIMEOUT_S = 2.0

DEFAULT_ROUTE = "default"


@dataclass(frozen=True, slots=True)
class Slots:
    """Which lanes and episodes the rows of a batch belong to; every field one entry a row."""

    env_indices: Sequence[int]
    episode_ids: Sequence[str]
    steps: Sequence[int]
    """Steps done in the episode so far."""
    resets: Sequence[bool]
    """Whether the row is the first observation of its episode."""

    def rows(self) -> tuple[PredictSlot, ...]:
        """Return them in the protocol's form."""
        fields = zip(self.env_indices, self.episode_ids, self.steps, self.resets, strict=True)
        return tuple(PredictSlot(*row) for row in fields)


@dataclass(frozen=True, slots=True)
class PredictTelemetry:
    """How an endpoint made a prediction."""

    policy_version: int
    """Of the weights that acted; 0 for those that the policy was loaded with."""
    queue_s: float
    """Time from the request's arrival there to the beginning of its batch."""
    forward_s: float
    """Time that the policy took for the whole batch."""
    batch_rows: int
    """Rows in the batch, those of others included."""
    server: str
    """Names the server, as long as it lives."""


def shake_hands(dial: Dial) -> Answer:
    """Ask a model endpoint what it is, without opening a session.

    Raises:
        EndpointError: It cannot be reached.
        HandshakeRefusedError: It does not speak this package's generation or edition.
    """
    channel = dial.open()
    try:
        return _handshake(dial, channel)
    finally:
        channel.close()


class RemoteModel:
    """A session with a ModelService.

    Safe to use from several threads: each route's requests are answered in the order in
    which they were sent, different routes do not wait for each other. After an error that the
    endpoint calls not recoverable only ``close`` is left to do.

    Args:
        address: ``HOST:PORT`` or ``unix:PATH``, with or without ``rlmesh://``.
        token: What the endpoint wants to see.
        tls: For an endpoint that speaks TLS.
        connect_timeout_s: For the connection and the handshake.
        predict_timeout_s: How long to wait for any answer.
        edition_text: The edition's text that the endpoint implements, where it is not this
            package's, such as ``"rlmesh-0.1.0b3"``; see ``Dial``.

    Raises:
        ConfigurationError: ``edition_text`` is not known.
        EndpointError: The endpoint cannot be reached or wants another token.
        HandshakeRefusedError: It does not speak this package's generation or edition.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        tls: ClientTls | None = None,
        connect_timeout_s: float = 10.0,
        predict_timeout_s: float = 60.0,
        edition_text: str | None = None,
    ) -> None:
        self._dial = Dial(address, token, tls, connect_timeout_s, edition_text)
        self._timeout_s = predict_timeout_s
        self._contracts: dict[str, EnvContract] = {}
        self._telemetry: dict[str, PredictTelemetry] = {}
        self._futures: dict[str, Future[ModelResponse]] = {}
        self._request_ids = map(str, itertools.count(1))
        self._lock = threading.Lock()
        self._failure: RlmeshError | None = None
        self._end: RemoteModelError | None = None
        self._channel = self._dial.open()
        try:
            self.answer = _handshake(self._dial, self._channel)
        except BaseException:
            self._channel.close()
            raise
        given_id = self.answer.capabilities.get(capabilities.SESSION, "")
        own = ((capabilities.SESSION_METADATA_KEY, given_id),) if given_id else ()
        # Every context names its session; rlmesh 0.1.0b3 gives no id and refuses an empty one.
        self._session_id = given_id or uuid.uuid4().hex
        self._stream = JoinStream(self._channel, _JOIN, self._dial.metadata + own, address)
        self._reader = threading.Thread(
            target=self._read, name="rlmesh-ray-model-client", daemon=True
        )
        self._reader.start()

    @property
    def address(self) -> str:
        """Where the endpoint was dialed."""
        return self._dial.address

    def configure_route(self, env: Any, *, route_id: str = DEFAULT_ROUTE) -> str:
        """Open a route for one environment.

        Args:
            env: An ``EnvContract``, anything with a ``contract`` (RemoteEnv, RemoteVectorEnv),
                or a gymnasium Env or VectorEnv.
            route_id: Names the route within this session.

        Returns:
            ``route_id``.

        Raises:
            RemoteModelError: The policy cannot act there; the message says why.
            EndpointError: The session broke.
        """
        contract = contract_of(env)
        context = PredictContext(self._session_id, route_id, "")
        self._ask(lambda rid: ConfigureRoute(rid, _with_id(context, rid), contract))
        self._contracts[route_id] = contract
        return route_id

    def predict(
        self, observation: Any, *, route_id: str = DEFAULT_ROUTE, slots: Slots | None = None
    ) -> Any:
        """Return one action a row.

        Args:
            observation: A batch, one row a slot, as gymnasium's vector environments give it.
            route_id: A configured route.
            slots: Whose rows these are; default: one row a lane of the route's contract,
                without episode ids.

        Returns:
            A batch of actions of the route's action space, one row a slot.

        Raises:
            LocalProtocolError: The route was not configured on this client.
            ConformanceError: ``observation`` has the wrong structure or dtype.
            RemoteModelError: The endpoint answered with an error.
            EndpointError: The session broke, or no answer came in time.
        """
        contract = self._contracts.get(route_id)
        if contract is None:
            raise LocalProtocolError(f"route {route_id!r} is not configured; configure_route first")
        rows = slots.rows() if slots else _all_lanes(contract.num_envs)
        columns = coerce_batch(contract.observation_space, observation, len(rows))
        data = values.encode_batch(contract.observation_space, columns, len(rows))
        context = PredictContext(self._session_id, route_id, "", rows)
        response = self._ask(lambda rid: Predict(rid, _with_id(context, rid), data))
        if not isinstance(response, Predicted):
            raise LocalProtocolError(f"{type(response).__name__} does not answer Predict")
        if response.run is not None:
            self._telemetry[route_id] = _telemetry(response.run, response.queue_ns)
        actions = values.decode_batch(contract.action_space, response.action, len(rows))
        return unflatten(
            contract.action_space,
            [action if isinstance(action, tuple) else action.copy() for action in actions],
        )

    def last_telemetry(self, route_id: str = DEFAULT_ROUTE) -> PredictTelemetry | None:
        """Return how the route's latest prediction was made.

        None before the first one, and when the endpoint does not tell (rlmesh-ray does).
        """
        return self._telemetry.get(route_id)

    def close_route(self, route_id: str = DEFAULT_ROUTE) -> None:
        """Release a route and the state that the policy keeps for it."""
        context = PredictContext(self._session_id, route_id, "")
        contract = self._contracts.get(route_id)
        self._ask(lambda rid: CloseRoute(rid, _with_id(context, rid)))
        # Another thread may have configured it anew already.
        if self._contracts.get(route_id) is contract:
            self._contracts.pop(route_id, None)
            self._telemetry.pop(route_id, None)

    def close(self) -> None:
        """End the session, not the service. Idempotent."""
        if self._failure is None:
            with contextlib.suppress(RlmeshError):  # it is closed below, whatever the peer does
                self._ask(CloseModel, timeout_s=_CLOSE_TIMEOUT_S)
            self._fail(EndpointClosedError("the session is closed", self._dial.address))
        self._stream.close()
        self._reader.join(_CLOSE_TIMEOUT_S)
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, make: Any, timeout_s: float | None = None) -> ModelResponse:
        """Send the request that ``make(request_id)`` returns and wait for its answer."""
        future: Future[ModelResponse] = Future()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            request: ModelRequest = make(next(self._request_ids))
            self._require_usable(request)
            self._futures[request.request_id] = future
            self._stream.send(wire.pack_request(request))
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            response = future.result(wait_s)
        except TimeoutError:
            with self._lock:
                self._futures.pop(request.request_id, None)
            raise EndpointTimeoutError(
                f"no answer within {wait_s:g} s", self._dial.address
            ) from None
        if isinstance(response, ModelFailed):
            raise self._error(response)
        return response

    def _require_usable(self, request: ModelRequest) -> None:
        """Let nothing but Close follow an error that ends the session."""
        if self._end is not None and not isinstance(request, CloseModel):
            raise EndpointLostError(
                f"the session ended with an error ({self._end}); close it and open a new one",
                self._dial.address,
            ) from self._end

    def _error(self, failed: ModelFailed) -> RemoteModelError:
        error = RemoteModelError(
            failed.code.name, failed.message, failed.is_recoverable, failed.debug_info
        )
        if not failed.is_recoverable:
            self._end = self._end or error
        return error

    def _read(self) -> None:
        try:
            for frame in self._stream.frames():
                response = wire.parse_response(frame)
                with self._lock:
                    future = self._futures.pop(response.request_id, None)
                if future is not None:
                    future.set_result(response)
        except (EndpointError, CodecError) as error:
            self._fail(error)

    def _fail(self, error: RlmeshError) -> None:
        with self._lock:
            self._failure = self._failure or error
            futures, self._futures = list(self._futures.values()), {}
        for future in futures:
            future.set_exception(error)


def contract_of(env: Any) -> EnvContract:
    """Return the contract of ``env``: its own, or one made from its spaces."""
    if isinstance(env, EnvContract):
        return env
    contract = getattr(env, "contract", None)
    if isinstance(contract, EnvContract):
        return contract
    is_vector = isinstance(env, gymnasium.vector.VectorEnv)
    spec_id = env.spec.id if env.spec is not None else type(env).__name__
    return EnvContract(
        id=spec_id,
        observation_space=from_gymnasium(
            env.single_observation_space if is_vector else env.observation_space
        ),
        action_space=from_gymnasium(env.single_action_space if is_vector else env.action_space),
        num_envs=env.num_envs if is_vector else 1,
        autoreset_mode=AutoresetMode.DISABLED,
    )


def _telemetry(run: BatchRun, queue_ns: int) -> PredictTelemetry:
    return PredictTelemetry(
        policy_version=run.policy_version,
        queue_s=queue_ns * 1e-9,
        forward_s=run.forward_ns * 1e-9,
        batch_rows=run.num_rows,
        server=run.component_id,
    )


def _all_lanes(num_lanes: int) -> tuple[PredictSlot, ...]:
    return tuple(PredictSlot(lane, "", 0, False) for lane in range(num_lanes))


def _with_id(context: PredictContext, request_id: str) -> PredictContext:
    return PredictContext(context.session_id, context.route_id, request_id, context.slots)


def _handshake(dial: Dial, channel: grpc.Channel) -> Answer:
    offer = make_offer(
        "rlmesh-ray", __version__, {capabilities.SPACES_CORE: ""}, text=dial.text_sha256
    )
    reply = dial.call(channel, _HANDSHAKE, wire.pack_offer(offer))
    with handshake_with(dial.address):
        answer: Answer = wire.parse_answer(reply)
        check_answer(offer, answer)
    return answer
