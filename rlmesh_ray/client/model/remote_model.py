"""RemoteModel: a served policy, from anywhere."""

import contextlib
import itertools
import os
import queue
import threading
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from rlmesh_ray.auth.client_tls import ClientTlsSource
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.client.channel import ConnectOptions, ServiceHandshake
from rlmesh_ray.client.fork_guard import NotPicklable, close_at_exit, forked
from rlmesh_ray.client.join_stream import JoinStream, open_call
from rlmesh_ray.client.model.action_player import ActionPlayer, Blend
from rlmesh_ray.client.model.model_dialect import (
    DialectModelSession,
    EditionModelClientDialect,
    EncodedRequest,
    Make,
    ModelClientDialect,
    ModelReply,
    PredictTelemetry,
    RouteBatch,
    RouteRequests,
    Slots,
)
from rlmesh_ray.dialects.registry import client_dialect
from rlmesh_ray.errors import ConfigurationError, ConformanceError, LocalProtocolError, RlmeshError
from rlmesh_ray.options import (
    DEFAULT_STEP_TIMEOUT_S,
    as_horizon,
    require_seconds,
    takes_no_more,
)
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.capabilities import IMAGE_CODEC, PROTOCOL_V1
from rlmesh_ray.protocol.client_session import ModelClientSession, timeout_error
from rlmesh_ray.protocol.handshake import HandshakeResponse
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.batch import Column, unflatten
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.gym_conversion import contract_of
from rlmesh_ray.spaces.observation_map import ObservationMap, as_observation_map
from rlmesh_ray.spaces.spec import SpaceSpec
from rlmesh_ray.spaces.validation import coerce_batch
from rlmesh_ray.wire import policy_v1
from rlmesh_ray.wire.image_codec_v1 import SentImages, require_offer
from rlmesh_ray.wire.policy_v1 import PolicyFacts
from rlmesh_ray.wire.rlmesh_v1 import model as edition_wire

ModelDialectFactory = Callable[[str], ModelClientDialect]
"""Makes the dialect of a session with this id."""
HANDSHAKE: ServiceHandshake[ModelDialectFactory] = ServiceHandshake(
    "/rlmesh.model.v1.ModelService/Handshake",
    edition_wire.HANDSHAKE,
    (capabilities.SPACES_CORE, capabilities.POLICY, capabilities.ACTION_CHUNKS),
    EditionModelClientDialect,
    "client.model_dialect",
)
generations_of = HANDSHAKE.generations

_MOST_DIGITS = 10
_SHOWN_CHARACTERS = 100
"""Of a route's id, in the name of the server's route for its chunks."""


def shake_hands(connect_options: ConnectOptions) -> HandshakeResponse:
    """Return a model endpoint's answer to the handshake, without opening a session.

    Raises:
        EndpointError: It cannot be reached.
        HandshakeRefusedError: It serves no generation or edition of this package.
    """
    session = open_dialect_session(connect_options)
    if session is not None:
        session.close()
        return session.answer
    with connect_options.open() as channel:
        return HANDSHAKE.negotiate(connect_options, channel)[1]


def open_dialect_session(connect_options: ConnectOptions) -> DialectModelSession | None:
    """Open a session in the dialect that the address names; None: it names none.

    Raises:
        ConfigurationError: The dialect's servers serve environments.
        MissingPackageError: The dialect's extra is not installed.
        EndpointError: The server cannot be reached.
    """
    dialect = client_dialect(connect_options.address)
    if dialect is None:
        return None
    if not dialect.serves_models:
        raise ConfigurationError(
            f"{connect_options.address} is an environment, since {dialect.name} serves nothing "
            "else; give the address of a policy"
        )
    dialect.require_installed()
    session: DialectModelSession = dialect.load("client").MODEL_SESSION(connect_options)
    return session


def policy_of(answer: HandshakeResponse) -> PolicyFacts:
    """Return the facts about the policy in a model endpoint's answer; empty: it has none."""
    return policy_v1.parse(answer.capabilities.get(capabilities.POLICY, ""))


def horizon_of(answer: HandshakeResponse) -> int | None:
    """Return how many actions the policy chooses at once, by a model endpoint's answer.

    None: the endpoint's generation reports it for each route, or not at all.
    """
    if answer.generation != PROTOCOL_V1:
        return None
    text = answer.capabilities.get(capabilities.ACTION_CHUNKS, "")
    # Longer numbers are no horizon of a policy, and Python's int may refuse them.
    return max(1, int(text)) if text.isdecimal() and len(text) < _MOST_DIGITS else 1


__all__ = ["PredictTelemetry", "RemoteModel", "Slots", "contract_of", "shake_hands"]

_JOIN = "/rlmesh.model.v1.ModelService/Join"

DEFAULT_ROUTE = "default"
_CLOSE_TIMEOUT_S = 2.0
# Ctrl-C cannot leave it locked, unlike a Future, which would then block the reader.
_Answer = queue.SimpleQueue[ModelReply | RlmeshError]
_ToColumns = Callable[[Any, int], list[Column]]
"""Makes the columns to send from a batch of observations and the number of its rows."""
_RESIZE_BY_THE_MAP = "give sizes in the observation_map, such as 'image=resize(camera,224,224)'"


class ModelSessionStream:
    """The requests and answers of one session. Safe to use from several threads.

    Args:
        stream: Join stream of the session.
        dialect: Dialect of the session.
        address: For error messages.
    """

    def __init__(self, stream: JoinStream, dialect: ModelClientDialect, address: str) -> None:
        self.stream = stream
        """The stream of the requests."""
        self._dialect = dialect
        self._address = address
        self.awaited: dict[str, _Answer] = {}
        """Where the answers to requests go, by the requests' ids."""
        self._request_ids = map(str, itertools.count(1))
        self._lock = threading.Lock()
        self._session = ModelClientSession(address)
        # The thread must not keep a dropped session alive, whose finalizer ends the thread.
        self._reader = threading.Thread(
            target=_read,
            args=(stream, weakref.ref(self)),
            name="rlmesh-ray-model-client",
            daemon=True,
        )
        weakref.finalize(self, stream.cancel).atexit = False
        self._reader.start()
        close_at_exit(self)

    def ask(self, make: Make, timeout_s: float, *, to_close: bool = False) -> ModelReply:
        """Send requests, each when the one before it was answered; return the last answer.

        Args:
            make: Called under the session's lock.
            timeout_s: How long to wait for each answer.
            to_close: Whether it is the request that closes the session.

        Raises:
            RemoteModelError: The endpoint answered one with an error; an error that it does not
                call recoverable ends the session.
            EndpointError: The session broke or is closed, or no answer came in time.
        """
        if os.getpid() != self.stream.pid:
            raise forked(self.stream.pid, self._address)
        waiting: deque[EncodedRequest] | None = None
        while True:
            answer: _Answer = queue.SimpleQueue()
            with self._lock:
                self._session.require_open(to_close=to_close)
                if waiting is None:
                    waiting = deque(make(self._request_ids))
                request = waiting.popleft()
                self.awaited[request.request_id] = answer
                self.stream.send(request.frame)
            reply = self._result(request, answer, timeout_s)
            if not waiting:
                return reply

    def close(self) -> None:
        """End the session and its stream; threads that wait get an error. Idempotent."""
        if os.getpid() != self.stream.pid:
            return  # the lock may be held by a thread that a fork does not have
        with self._lock:
            is_first = not self._session.is_closed
            self._session.close()
        if is_first:
            with contextlib.suppress(RlmeshError):  # it is closed below in any case
                self.ask(lambda ids: [self._dialect.close(ids)], _CLOSE_TIMEOUT_S, to_close=True)
        self.fail(self._session.closed())
        self.stream.close()
        self._reader.join(_CLOSE_TIMEOUT_S)

    def _result(self, request: EncodedRequest, answer: _Answer, timeout_s: float) -> ModelReply:
        try:
            reply = answer.get(timeout=timeout_s)
        except queue.Empty:
            with self._lock:
                self.awaited.pop(request.request_id, None)
            raise timeout_error(timeout_s, self._address) from None
        if isinstance(reply, RlmeshError):
            raise reply
        if reply.failure is not None:
            raise self._session.error_of(reply.failure)
        return reply

    def take(self, frame: bytes) -> None:
        """Hand an answer to the thread that waits for it.

        Raises:
            RlmeshError: It is malformed.
        """
        reply = self._dialect.read(frame)
        with self._lock:
            answer = self.awaited.pop(reply.request_id, None)
        if answer is not None:
            answer.put(reply)

    def fail(self, error: RlmeshError) -> None:
        """Note that the stream has ended; threads that wait get an error."""
        with self._lock:
            error = self._session.lose(error)
            answers, self.awaited = list(self.awaited.values()), {}
        for answer in answers:
            answer.put(error)


def _read(stream: JoinStream, session: "weakref.ref[ModelSessionStream]") -> None:
    try:
        while True:
            frame = stream.receive()
            if (own := session()) is None:
                return
            own.take(frame)
            del own
    except RlmeshError as error:
        if (own := session()) is not None:
            own.fail(error)


@dataclass(slots=True)
class _Route:
    """A route that ``configure_route`` has opened."""

    contract: EnvContract
    to_columns: _ToColumns
    horizon: int
    """How many actions ``predict_chunk`` asks for at most."""
    names: dict[bool, str] = field(default_factory=dict)
    """The server's routes that are used, by whether chunks are asked for there."""
    telemetry: PredictTelemetry | None = None


class RemoteModel(NotPicklable):
    """A session with a ModelService.

    Safe to use from several threads: each route's requests are answered in the order in
    which they were sent, different routes do not wait for each other. After an error that the
    endpoint calls not recoverable only ``close`` is left to do.

    Args:
        address: ``HOST:PORT`` or ``unix:PATH``, with or without ``rlmesh://`` or
            ``tcp://``; or ``openpi://HOST:PORT``, also with a path (extra ``openpi``), where each
            lane of a route has a connection of its own, which is opened anew with each episode.
        token: The token that the endpoint requires, or the file that has it (``TokenFile``).
        tls: For an endpoint with TLS.
        connect_timeout_s: For the connection and the handshake.
        predict_timeout_s: How long to wait for any answer.
        edition_text: The edition's text that the endpoint implements, where it is not this
            package's, such as ``"rlmesh-0.1.0b3"``; see ``ConnectOptions``.

    Raises:
        ConfigurationError: ``edition_text`` is not known, or a time is none.
        EndpointError: The endpoint cannot be reached or wants another token.
        HandshakeRefusedError: It has no dialect or edition of this package.
    """

    def __init__(
        self,
        address: str,
        *,
        token: TokenSource | None = None,
        tls: ClientTlsSource | None = None,
        connect_timeout_s: float = 10.0,
        predict_timeout_s: float = DEFAULT_STEP_TIMEOUT_S,
        edition_text: str | None = None,
    ) -> None:
        require_seconds("predict_timeout_s", predict_timeout_s)
        self._connect_options = ConnectOptions(address, token, tls, connect_timeout_s, edition_text)
        self._timeout_s = predict_timeout_s
        self._routes: dict[str, _Route] = {}
        self._lock = threading.Lock()
        self._dialect: RouteRequests
        self._session_stream: ModelSessionStream | DialectModelSession
        session = open_dialect_session(self._connect_options)
        if session is not None:
            self.answer = session.answer
            self._dialect = self._session_stream = session
            return
        channel = self._connect_options.open()
        try:
            variant, self.answer = HANDSHAKE.negotiate(self._connect_options, channel)
        except BaseException:
            channel.close()
            raise
        given_id = self.answer.capabilities.get(capabilities.SESSION, "")
        own = ((capabilities.SESSION_METADATA_KEY, given_id),) if given_id else ()
        # Every context names its session; rlmesh 0.1.0b3 gives no id and refuses an empty one.
        self._session_id = given_id or uuid.uuid4().hex
        self._dialect = dialect = variant.make_dialect(self._session_id)
        call = open_call(channel, _JOIN, self._connect_options.metadata + own)
        stream = JoinStream(call, address, channel)
        self._session_stream = ModelSessionStream(stream, dialect, address)

    @property
    def address(self) -> str:
        """Where the endpoint was dialed."""
        return self._connect_options.address

    @takes_no_more(resize=_RESIZE_BY_THE_MAP)
    def configure_route(
        self,
        env: Any,
        *,
        route_id: str = DEFAULT_ROUTE,
        observation_map: ObservationMap | Sequence[str] | Mapping[str, str] | None = None,
        horizon: int | None = None,
        image_codec: str | None = None,
    ) -> str:
        """Open a route for one environment.

        Args:
            env: An ``EnvContract``, anything with a ``contract`` (RemoteEnv, RemoteVectorEnv),
                or a gymnasium Env or VectorEnv.
            route_id: Names the route within this session.
            observation_map: Makes the observations to send from those that ``predict`` gets: an
                ``ObservationMap``, or its entries, such as ``{"image": "resize(camera,224,224)"}``.
                The policy gets its keys alone.
            horizon: How many actions ``predict_chunk`` asks for at most; default: as many as the
                policy chooses at once. A released server whose model does not declare its
                ``native_chunk`` gives one, unless this asks for more.
            image_codec: Compresses the images of the observations: ``"jpeg:95"`` or another
                quality, ``"webp:80"``, or without loss ``"png"`` or ``"webp"``. Images are uint8
                Boxes from 0 to 255 of shape ``(..., height, width, channels)`` with 1, 3 or 4
                channels; JPEG takes 1 or 3, WebP 3. None: they travel as they are.

        Returns:
            ``route_id``.

        Raises:
            ConfigurationError: ``route_id`` is no text, ``observation_map`` is wrong, ``horizon``
                is no number of actions or more than the policy chooses at once, or ``image_codec``
                does not fit the observation space or the endpoint.
            ContractMismatchError: The map does not fit the environment.
            RemoteModelError: The policy cannot act there; the message says why.
            EndpointError: The session broke.
        """
        if not isinstance(route_id, str):
            raise ConfigurationError(f"route_id={route_id!r:.40} must be text")
        wanted = None if horizon is None else as_horizon(horizon)
        self._require_chosen(wanted, horizon_of(self.answer))
        contract = contract_of(env)
        own_space, mapping = contract.observation_space, as_observation_map(observation_map)
        if mapping is not None:
            contract = replace(contract, observation_space=mapping.space(own_space))
        to_columns: _ToColumns = partial(coerce_batch, contract.observation_space)
        if image_codec is not None:
            images = SentImages(contract, image_codec, {})
            require_offer(f"{image_codec=}", images.format, self.answer.capabilities, self.address)
            contract = replace(contract, metadata={**contract.metadata, IMAGE_CODEC: image_codec})
        if mapping is not None:
            to_columns = partial(_mapped, own_space, mapping, to_columns)
        reply = self._open(route_id, contract, 1)
        known = reply.horizon or horizon_of(self.answer)
        try:
            self._require_chosen(wanted, known)
        except ConfigurationError:
            before = self._routes.get(route_id)
            if before is None:
                self._release(route_id)
            else:
                self._open(route_id, before.contract, 1)
                if before.names:
                    before.names[False] = route_id
            raise
        with self._lock:
            before = self._routes.get(route_id)
            former_chunks = before.names.pop(True, None) if before else None
        if former_chunks is not None:
            self._release(former_chunks)
        self._routes[route_id] = _Route(contract, to_columns, wanted or known or 1)
        return route_id

    def _require_chosen(self, wanted: int | None, known: int | None) -> None:
        """Require a horizon that is not above that of the policy; None: it is not known."""
        if wanted is not None and known is not None and wanted > known:
            raise ConfigurationError(
                f"{wanted} actions at once are more than the policy of {self.address} chooses, "
                f"which is {known}: lower the horizon (horizon=…, execution_horizon=…, "
                "--execution-horizon) to that, or leave it out"
            )

    def predict(
        self, observation: Any, *, route_id: str = DEFAULT_ROUTE, slots: Slots | None = None
    ) -> Any:
        """Return one action a row.

        Args:
            observation: A batch, one row a slot, as gymnasium's vector environments give it.
            route_id: A configured route.
            slots: Whose rows these are; default: one row a lane of the route's contract,
                without episode ids: as if no episode ever ended. A recurrent policy needs them
                to begin anew.

        Returns:
            A batch of actions of the route's action space, one row a slot.

        Raises:
            LocalProtocolError: The route was not configured on this client.
            ConformanceError: ``observation`` has the wrong structure or dtype, or ``slots`` are
                not one a row.
            RemoteModelError: The endpoint answered with an error.
            EndpointError: The session broke, or no answer came in time.
        """
        route = self._configured(route_id)
        batch = self._checked(observation, route, slots)
        actions = self._actions(route_id, route, batch)
        return unflatten(
            batch.contract.action_space,
            [action if isinstance(action, tuple) else action.copy() for action in actions],
        )

    def predict_chunk(
        self, observation: Any, *, route_id: str = DEFAULT_ROUTE, slots: Slots | None = None
    ) -> Any:
        """Return the next actions of each row: for this step and those after it.

        Args:
            observation: See ``predict``.
            route_id: See ``predict``.
            slots: See ``predict``.

        Returns:
            Chunks of actions of the route's action space: each leaf ``(rows, horizon, *action)``,
            for Text tuples of ``horizon`` strings. The horizon is that of ``configure_route``; 1
            where the policy chooses one action at a time; and fewer where the model of a released
            server that declares no length gives fewer.

        Raises:
            RlmeshError: See ``predict``.
        """
        route = self._configured(route_id)
        batch = self._checked(observation, route, slots)
        contract, num_rows, horizon = batch.contract, len(batch.rows), route.horizon
        if horizon == 1:
            steps = self._actions(route_id, route, batch)
        else:
            name = self._name(route_id, route, horizon)
            reply = self._ask(route, lambda ids: self._dialect.predict_chunk(ids, name, batch))
            steps = self._dialect.actions(contract, reply, num_rows, horizon)
        return unflatten(contract.action_space, [_by_row(each, num_rows) for each in steps])

    def _actions(self, route_id: str, route: _Route, batch: RouteBatch) -> list[Column]:
        """Return one action a row; arrays may be read-only."""
        contract, rows, columns = batch
        name = self._name(route_id, route, 1)
        data = self._dialect.encode(contract, columns, len(rows))
        reply = self._ask(route, lambda ids: self._dialect.predict(ids, name, rows, data))
        return self._dialect.actions(contract, reply, len(rows))

    def _ask(self, route: _Route, make: Make) -> ModelReply:
        """Send a prediction of a route, and keep its telemetry."""
        reply = self._session_stream.ask(make, self._timeout_s)
        if reply.telemetry is not None:
            route.telemetry = reply.telemetry
        return reply

    @takes_no_more(resize=_RESIZE_BY_THE_MAP)
    def actions(
        self,
        env: Any,
        *,
        route_id: str = DEFAULT_ROUTE,
        observation_map: ObservationMap | Sequence[str] | Mapping[str, str] | None = None,
        image_codec: str | None = None,
        execution_horizon: int | None = None,
        prefetch: int | str = "auto",
        blend: Blend = "newest",
    ) -> ActionPlayer:
        """Open a route, and return a player of its chunks for a loop that the caller runs.

        The player asks for the next chunk while the present one is played, so that a simulator or
        a robot keeps its pace. With a policy that chooses one action at a time it waits for each.

        Args:
            env: See ``configure_route``. An environment's actions are single ones, a vector's are
                batches; a bare contract counts as an environment if it has one lane.
            route_id: Names the route within this session; each player needs its own.
            observation_map: See ``configure_route``.
            image_codec: Likewise.
            execution_horizon: See ``ChunkPlayer``.
            prefetch: Likewise.
            blend: Likewise.

        Raises:
            ConfigurationError: An option is none, or ``execution_horizon`` is more than the policy
                chooses at once, or ``"mean"`` is given where an action is no float.
            ContractMismatchError: The map does not fit the environment.
            UnsupportedSpaceError: The actions have text in them.
            RemoteModelError: The policy cannot act there; the message says why.
            EndpointError: The session broke.
        """
        player = ActionPlayer(
            self,
            env,
            route_id=route_id,
            execution_horizon=execution_horizon,
            prefetch=prefetch,
            blend=blend,
        )
        self.configure_route(
            env,
            route_id=route_id,
            observation_map=observation_map,
            horizon=execution_horizon,
            image_codec=image_codec,
        )
        return player

    def _configured(self, route_id: str) -> _Route:
        route = self._routes.get(route_id)
        if route is None:
            raise LocalProtocolError(f"route {route_id!r} is not configured; configure_route first")
        return route

    def _checked(self, observation: Any, route: _Route, slots: Slots | None) -> RouteBatch:
        """Return the observation as the dialects take it."""
        if not isinstance(slots, Slots | None):
            problem = f"is a {type(slots).__name__}, expected rlmesh_ray.Slots"
            raise ConformanceError("structure", "slots", problem)
        lanes = range(route.contract.num_envs)
        rows = slots.rows() if slots else [PredictSlot(lane, "", 0, False) for lane in lanes]
        return RouteBatch(route.contract, rows, route.to_columns(observation, len(rows)))

    def _name(self, route_id: str, route: _Route, horizon: int) -> str:
        """Return the server's route for one action or for chunks, which is opened if need be.

        The route of ``configure_route`` is closed if chunks are asked for first: a server with a
        ``max_delay_s`` would have each batch wait for it.
        """
        names, has_chunks = route.names, horizon > 1
        if has_chunks in names:
            return names[has_chunks]
        with self._lock:
            if has_chunks not in names:
                name = route_id
                if has_chunks:  # ids have a longest length
                    name = f"{route_id[:_SHOWN_CHARACTERS]}-chunks-{uuid.uuid4().hex}"
                if names or has_chunks:
                    self._open(name, route.contract, horizon)
                if not names and has_chunks:
                    self._release(route_id)
                names[has_chunks] = name
            return names[has_chunks]

    def _open(self, route_id: str, contract: EnvContract, horizon: int) -> ModelReply:
        return self._session_stream.ask(
            lambda ids: [self._dialect.configure(ids, route_id, contract, horizon)],
            self._timeout_s,
        )

    def _release(self, route_id: str) -> None:
        self._session_stream.ask(
            lambda ids: [self._dialect.release(ids, route_id)], self._timeout_s
        )

    def last_telemetry(self, route_id: str = DEFAULT_ROUTE) -> PredictTelemetry | None:
        """Return how the route's latest prediction was made.

        None before the first one, and when the endpoint reports nothing. Endpoints of rlmesh-ray
        report everything, those of the released rlmesh only the times.
        """
        route = self._routes.get(route_id)
        return None if route is None else route.telemetry

    def close_route(self, route_id: str = DEFAULT_ROUTE) -> None:
        """Release a route and the state that the policy keeps for it."""
        route = self._routes.get(route_id)
        for name in (route and set(route.names.values())) or {route_id}:
            self._release(name)
        # Another thread may have configured it anew already.
        if self._routes.get(route_id) is route:
            self._routes.pop(route_id, None)

    def close(self) -> None:
        """End the session, not the service. Idempotent."""
        self._session_stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _mapped(
    space: SpaceSpec,
    mapping: ObservationMap,
    to_columns: _ToColumns,
    observation: Any,
    num_rows: int,
) -> list[Column]:
    columns = coerce_batch(space, observation, num_rows)
    return to_columns(mapping.apply(unflatten(space, columns)), num_rows)


def _by_row(steps: Any, num_rows: int) -> Any:
    """Return one leaf's chunks ``(rows, horizon, *action)``; of Text a tuple for each row.

    Args:
        steps: The rows of all steps, one step after the other.
        num_rows: Rows of a step.
    """
    if isinstance(steps, tuple):
        return tuple(steps[row::num_rows] for row in range(num_rows))
    by_step = steps.reshape(len(steps) // num_rows, num_rows, *steps.shape[1:])
    return by_step.swapaxes(0, 1).copy()
