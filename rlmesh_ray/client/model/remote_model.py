"""RemoteModel: a served policy, from anywhere; ActionPlayer: its chunks, one action per step."""

import contextlib
import itertools
import os
import queue
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.auth.client_tls import ClientTlsSource
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.client.channel import ConnectOptions, ServiceHandshake, as_connect_options
from rlmesh_ray.client.fork_guard import NotPicklable, close_at_exit, forked
from rlmesh_ray.client.join_stream import JoinStream, open_call
from rlmesh_ray.client.model.chunk_player import (
    AUTO,
    NEWEST,
    Blend,
    ChunkPlayer,
    ChunkRequest,
    PlayerStatistics,
    require_blendable,
)
from rlmesh_ray.client.model.model_dialect import (
    DialectModelSession,
    EditionModelClientDialect,
    Encode,
    EncodedRequest,
    Make,
    ModelReply,
    PredictTelemetry,
    RouteBatch,
    Slots,
)
from rlmesh_ray.dialects.registry import client_dialect
from rlmesh_ray.errors import (
    ConfigurationError,
    ConformanceError,
    EndpointError,
    LocalProtocolError,
    RlmeshError,
    UnsupportedSpaceError,
)
from rlmesh_ray.options import (
    DEFAULT_STEP_TIMEOUT_S,
    as_horizon,
    as_int,
    require_seconds,
    takes_no_more,
)
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.capabilities import IMAGE_CODEC, PROTOCOL_V1
from rlmesh_ray.protocol.client_session import ModelClientSession, timeout_error
from rlmesh_ray.protocol.handshake import HandshakeResponse
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.batch import Column, flatten, leaves, stack, unflatten
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import contract_of
from rlmesh_ray.spaces.observation_map import ObservationMap, as_observation_map
from rlmesh_ray.spaces.spec import SpaceSpec
from rlmesh_ray.spaces.validation import coerce_batch
from rlmesh_ray.wire import policy_v1
from rlmesh_ray.wire.image_codec_v1 import SentImages, require_offer
from rlmesh_ray.wire.policy_v1 import PolicyFacts
from rlmesh_ray.wire.rlmesh_v1 import model as edition_wire

HANDSHAKE = ServiceHandshake(
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
    """Return a model endpoint's answer to the handshake, without opening a session."""
    session = open_dialect_session(connect_options)
    if session is not None:
        session.close()
        return session.answer
    return HANDSHAKE.probe(connect_options)


def open_dialect_session(connect_options: ConnectOptions) -> DialectModelSession | None:
    """Open a session in the dialect that the address names; None: it names none.

    Raises:
        ConfigurationError: The dialect's servers serve environments.
        MissingPackageError: The dialect's extra is not installed.
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
    """The requests and answers of one session. Safe to use from several threads."""

    def __init__(
        self, stream: JoinStream, dialect: EditionModelClientDialect, address: str
    ) -> None:
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
                self.ask(lambda ids: [self._dialect.end(ids)], _CLOSE_TIMEOUT_S, to_close=True)
        self.fail(self._session.closed())
        self.stream.close()
        self._reader.join(_CLOSE_TIMEOUT_S)

    def take(self, frame: bytes) -> None:
        """Hand an answer to the thread that waits for it; RlmeshError if it is malformed."""
        reply = self._dialect.read(frame)
        with self._lock:
            answer = self.awaited.pop(reply.request_id, None)
        if answer is not None:
            answer.put(reply)

    def fail(self, error: RlmeshError) -> None:
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
    encode: Encode
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
            Or a ``ConnectOptions``; options below that are given replace its fields.
        token: The token that the endpoint requires, or the file that has it (``TokenFile``).
        tls: For an endpoint with TLS.
        connect_timeout_s: For the connection and the handshake; default: 10 s.
        predict_timeout_s: How long to wait for any answer.
        edition_text: The edition's text that the endpoint implements, where it is not this
            package's, such as ``"rlmesh-0.1.0b3"``; see ``ConnectOptions``.

    Raises:
        ConfigurationError: ``edition_text`` is not known, or a timeout is not a time.
        EndpointError: The endpoint cannot be reached or wants another token.
        HandshakeRefusedError: It has no dialect or edition of this package.
    """

    def __init__(
        self,
        address: str | ConnectOptions,
        *,
        token: TokenSource | None = None,
        tls: ClientTlsSource | None = None,
        connect_timeout_s: float | None = None,
        predict_timeout_s: float = DEFAULT_STEP_TIMEOUT_S,
        edition_text: str | None = None,
    ) -> None:
        require_seconds("predict_timeout_s", predict_timeout_s)
        self._connect_options = as_connect_options(
            address, token=token, tls=tls, timeout_s=connect_timeout_s, edition_text=edition_text
        )
        self._timeout_s = predict_timeout_s
        self._routes: dict[str, _Route] = {}
        self._lock = threading.Lock()
        self._dialect: EditionModelClientDialect
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
        stream = JoinStream(call, self.address, channel)
        self._session_stream = ModelSessionStream(stream, dialect, self.address)

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
            ConfigurationError: ``route_id`` is not text, ``observation_map`` is wrong, ``horizon``
                is not a number of actions or more than the policy chooses at a time, or
                ``image_codec`` does not fit the observation space or the endpoint.
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
        self._routes[route_id] = _Route(
            contract, to_columns, self._dialect.encoder(contract), wanted or known or 1
        )
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
        """Return one action per row.

        Args:
            observation: A batch, one row per slot, as gymnasium's vector environments give it.
            route_id: A configured route.
            slots: Whose rows these are; default: one row per lane of the route's contract,
                without episode ids: as if no episode ever ended. A recurrent policy needs them
                to begin anew.

        Returns:
            A batch of actions of the route's action space, one row per slot.

        Raises:
            LocalProtocolError: The route was not configured on this client.
            ConformanceError: ``observation`` has the wrong structure or dtype, or ``slots`` are
                not one per row.
            RemoteModelError: The endpoint answered with an error.
            EndpointError: The session broke, or no answer came in time.
        """
        actions, contract, _ = self._actions(observation, route_id, slots, horizon=1)
        return unflatten(
            contract.action_space,
            [action if isinstance(action, tuple) else action.copy() for action in actions],
        )

    def predict_chunk(
        self, observation: Any, *, route_id: str = DEFAULT_ROUTE, slots: Slots | None = None
    ) -> Any:
        """Return the next actions of each row: for this step and those after it.

        Arguments and errors are those of ``predict``.

        Returns:
            Chunks of actions of the route's action space: each leaf ``(rows, horizon, *action)``,
            for Text tuples of ``horizon`` strings. The horizon is that of ``configure_route``; 1
            where the policy chooses one action at a time; and fewer where the model of a released
            server that declares no length gives fewer.
        """
        steps, contract, num_rows = self._actions(observation, route_id, slots)
        return unflatten(contract.action_space, [_by_row(each, num_rows) for each in steps])

    def _actions(
        self, observation: Any, route_id: str, slots: Slots | None, horizon: int | None = None
    ) -> tuple[list[Column], EnvContract, int]:
        """Return the actions of a prediction, the route's contract and the number of rows.

        ``horizon``: steps to ask for; None: those of the route. The order of the actions is that of
        ``EditionModelClientDialect.actions``; arrays may be read-only.
        """
        route = self._routes.get(route_id)
        if route is None:
            raise LocalProtocolError(f"route {route_id!r} is not configured; configure_route first")
        if not isinstance(slots, Slots | None):
            problem = f"is a {type(slots).__name__}, expected rlmesh_ray.Slots"
            raise ConformanceError("structure", "slots", problem)
        contract, dialect, horizon = route.contract, self._dialect, horizon or route.horizon
        lanes = range(contract.num_envs)
        rows = slots.rows() if slots else [PredictSlot(lane, "", 0, False) for lane in lanes]
        columns = route.to_columns(observation, len(rows))
        name = route.names.get(horizon > 1) or self._name(route_id, route, horizon)
        if horizon > 1:
            batch = RouteBatch(route.encode, rows, columns)
            make = partial(dialect.predict_chunk, route_id=name, batch=batch)
        else:
            data = route.encode(columns, len(rows))
            make = partial(dialect.predict, route_id=name, rows=rows, observation=data)
        reply = self._session_stream.ask(make, self._timeout_s)
        if reply.telemetry is not None:
            route.telemetry = reply.telemetry
        return dialect.actions(contract, reply, len(rows), horizon), contract, len(rows)

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
    ) -> "ActionPlayer":
        """Open a route, and return a player of its chunks for a loop that the caller runs.

        The player asks for the next chunk while the present one is played, so that a simulator or
        a robot keeps its pace. With a policy that chooses one action at a time it waits for each.

        An environment's actions are single ones, a vector's are batches; a bare contract counts as
        an environment if it has one lane. Each player needs a ``route_id`` that no other has.
        ``execution_horizon``, ``prefetch`` and ``blend`` are those of ``ChunkPlayer``, all other
        options those of ``configure_route``.

        Raises:
            ConfigurationError: An option is invalid, ``execution_horizon`` is more than the policy
                chooses at a time, or ``"mean"`` is given for actions that are not floats.
            UnsupportedSpaceError: The actions contain text.
            RlmeshError: As ``configure_route``.
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

    def _name(self, route_id: str, route: _Route, horizon: int) -> str:
        """Return the server's route for one action or for chunks, which is opened if need be.

        The route of ``configure_route`` is closed if chunks are asked for first: a server with a
        ``max_delay_s`` would have each batch wait for it.
        """
        names, has_chunks = route.names, horizon > 1
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
    """Return one leaf's chunks ``(rows, horizon, *action)``; of Text a tuple for each row."""
    if isinstance(steps, tuple):
        return tuple(steps[row::num_rows] for row in range(num_rows))
    by_step = steps.reshape(len(steps) // num_rows, num_rows, *steps.shape[1:])
    return by_step.swapaxes(0, 1).copy()


_Sent = Sequence[tuple[ChunkPlayer, ChunkRequest]]
"""The players whose rows a message has, in their order, and their requests."""
_TimedChunks = tuple[Any, float]
"""Chunks of some lanes, and when they came."""


class ActionPlayer:
    """Actions for a loop that its caller runs, from chunks that are asked for ahead of time.

    ``RemoteModel.actions`` makes it. One lane, or all lanes of a vector, have a ``ChunkPlayer``
    each. The next chunks are asked for in a thread of the player's own, with one message for all
    lanes, while the present ones are played. ``act`` waits only for an action that is missing: that
    of an episode's first step, and of a step that has come before its chunk. To be used by one
    thread at a time.

    Args:
        model: The session with the policy, with a route for the environment.
        env: See ``RemoteModel.actions``, as for all other arguments.
    """

    def __init__(
        self,
        model: RemoteModel,
        env: Any,
        *,
        route_id: str,
        execution_horizon: int | None = None,
        prefetch: int | str = AUTO,
        blend: Blend = NEWEST,
    ) -> None:
        contract = contract_of(env)
        self._players = [
            ChunkPlayer(execution_horizon=execution_horizon, prefetch=prefetch, blend=blend)
            for _ in range(contract.num_envs)
        ]
        for leaf in leaves(contract.action_space):
            if leaf.dtype is None:
                where = f" {leaf.name!r}" if leaf.name else ""
                raise UnsupportedSpaceError(
                    f"the action{where} is text, which no player can take: use predict_chunk"
                )
            require_blendable(blend, leaf.dtype, leaf.name)
        self._model = model
        self._route_id = route_id
        self._observation_space = contract.observation_space
        self._action_space = contract.action_space
        self._is_batched = isinstance(env, gymnasium.vector.VectorEnv) or contract.num_envs > 1
        self._resets_next_step = _autoreset_mode(env) == AutoresetMode.NEXT_STEP.value
        self._episode_ids = [""] * contract.num_envs
        self._num_episodes = 0
        self._actions: list[Any] = [None] * contract.num_envs
        """The latest action of each lane."""
        self._has_action = np.zeros(contract.num_envs, np.bool_)
        """Lanes whose action of this step is there, though an error has kept ``act`` from
        returning it."""
        self._is_ending = np.zeros(contract.num_envs, np.bool_)
        """Lanes that reset themselves on the step that follows."""
        self._executor: ThreadPoolExecutor | None = None
        self._pending: tuple[Future[_TimedChunks], _Sent] | None = None
        self._is_closed = False
        for lane in range(contract.num_envs):
            self._begin(lane)

    @property
    def statistics(self) -> PlayerStatistics:
        """The counters of all lanes together, and the longest latency."""
        own = [player.statistics for player in self._players]
        added = PlayerStatistics(*map(sum, zip(*own, strict=True)))
        return added._replace(latency_s=max(each.latency_s for each in own))

    def act(self, observation: Any, *, done: Any = False, skipped: int = 0) -> Any:
        """Return the next action.

        Args:
            observation: Of an environment; of a vector: of all lanes. It is copied where it is
                sent, so the environment may overwrite it.
            done: Whether the latest step has ended an episode (``terminated or truncated``): this
                observation is the first of the next one. For a vector, one per lane. If lanes reset
                themselves on the step after (``AutoresetMode.NEXT_STEP``), this observation is the
                last of its episode, and the next one begins with the following call.
            skipped: How many steps have passed since the latest one without an action, as those of
                a robot that moves on while this waits. Their actions are left out. 0 where this is
                called again after an error.

        Raises:
            ConfigurationError: The policy returns fewer actions than the execution horizon,
                ``blend`` does not return an action, or ``skipped`` is not a number of steps.
            ConformanceError: ``observation`` or ``done`` does not fit the environment.
            LocalProtocolError: The player is closed.
            RemoteModelError: The endpoint answered with an error.
            EndpointError: The session broke, or no answer came in time.
        """
        if self._is_closed:
            raise LocalProtocolError("the player is closed: RemoteModel.actions makes another one")
        if as_int("skipped", skipped) < 0:
            raise ConfigurationError(f"skipped={skipped} must be 0 or more")
        is_over = self._begin_episodes(done)
        settled = self._has_action | is_over
        lanes = np.flatnonzero(~settled).tolist()
        for lane in lanes:
            if self._players[lane].step:  # else its episode begins with this observation
                self._players[lane].skip(skipped)
        self._receive(wait=False)
        self._request_ahead(observation, lanes)
        missing = self._play(lanes)
        while missing:
            lacking = [lane for lane in missing if self._players[lane].wants_request()]
            if self._pending is not None and not lacking:
                self._receive(wait=True)
            else:
                rows, slots, sent = self._message(observation, lacking or missing)
                self._deliver(sent, lambda: self._ask(rows, slots))  # noqa: B023  # called immediately
            missing = self._play(missing)
        self._has_action[:] = False
        self._is_ending = is_over
        if not self._is_batched:
            return unflatten(self._action_space, self._actions[0])
        return unflatten(
            self._action_space, [np.stack(parts) for parts in zip(*self._actions, strict=True)]
        )

    def begin_episode(self, lane: int, episode_id: str) -> None:
        """Begin an episode with the next observation; ``act`` does so where a lane is done.

        Args:
            lane: Index of the lane; 0 for a single environment.
            episode_id: Id of the episode in requests; another one for each episode.

        Raises:
            ConfigurationError: There is no such lane.
        """
        if not 0 <= as_int("lane", lane) < len(self._players):
            raise ConfigurationError(f"lane={lane} must be from 0 to {len(self._players) - 1}")
        self._players[lane].begin_episode()
        self._episode_ids[lane] = episode_id
        self._has_action[lane] = False

    def close(self) -> None:
        """Close the route and end the player's thread; the session stays open. Idempotent."""
        self._end(waits=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After Ctrl-C, the session's end ends the thread and the route.
        self._end(waits=kind is None or issubclass(kind, Exception))

    def _end(self, *, waits: bool) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=waits, cancel_futures=True)
            self._executor = self._pending = None
        was_open, self._is_closed = not self._is_closed, True
        if waits and was_open:
            with contextlib.suppress(EndpointError):  # a session that broke has no routes
                self._model.close_route(self._route_id)

    def _begin(self, lane: int) -> None:
        self._num_episodes += 1
        self.begin_episode(lane, f"{self._route_id}-{self._num_episodes}")

    def _begin_episodes(self, done: Any) -> NDArray[np.bool_]:
        """Begin the episodes of this observation; return the lanes whose action is ignored."""
        try:
            values = np.asarray(done)
            is_done = np.broadcast_to(values.astype(np.bool_), self._is_ending.shape)
        except ValueError as error:
            problem = f"must have one entry per lane, shape {self._is_ending.shape}: {error}"
            raise ConformanceError("structure", "done", problem) from error
        if values.dtype.kind not in "biuf" or not (values == is_done).all():  # "False" is no False
            problem = f"is {done!r:.40}, expected True or False, one per lane"
            raise ConformanceError("structure", "done", problem)
        begins, is_over = is_done, np.zeros_like(self._is_ending)
        if self._resets_next_step:
            # No step has been taken where an episode has just begun, so none can have ended it.
            has_acted = [player.step > 0 for player in self._players]
            is_over = is_done & ~self._is_ending & has_acted
            begins = self._is_ending
        for lane in np.flatnonzero(begins).tolist():
            self._begin(lane)
        return is_over

    def _play(self, lanes: Sequence[int]) -> list[int]:
        """Take the next action of each lane; return the lanes that have none."""
        now_s = time.monotonic()
        missing = []
        for lane in lanes:
            action = self._players[lane].next_action(now_s)
            if action is None:
                missing.append(lane)
            else:
                self._actions[lane], self._has_action[lane] = action, True
        return missing

    def _request_ahead(self, observation: Any, lanes: Sequence[int]) -> None:
        """Ask in the background for all lanes that have actions left, if one lane wants it."""
        if self._pending is not None:
            return
        players = self._players
        able = [lane for lane in lanes if players[lane].num_left and players[lane].can_request]
        if not any(players[lane].wants_request() for lane in able):
            return
        rows, slots, sent = self._message(observation, able)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="rlmesh-ray-actions")
        self._pending = (self._executor.submit(self._ask, rows, slots), sent)

    def _ask(self, rows: Any, slots: Slots) -> _TimedChunks:
        chunk = self._model.predict_chunk(rows, route_id=self._route_id, slots=slots)
        return chunk, time.monotonic()

    def _message(self, observation: Any, lanes: list[int]) -> tuple[Any, Slots, _Sent]:
        """Return copies of the observations of some lanes, and record that they are sent."""
        if self._is_batched:
            columns = coerce_batch(self._observation_space, observation, len(self._players))
        else:
            columns = stack(self._observation_space, [observation])
        rows = unflatten(self._observation_space, [_rows_of(column, lanes) for column in columns])
        players = [self._players[lane] for lane in lanes]
        slots = Slots(
            env_indices=lanes,
            episode_ids=[self._episode_ids[lane] for lane in lanes],
            steps=[player.step for player in players],
            resets=[player.step == 0 for player in players],
        )
        now_s = time.monotonic()
        return rows, slots, [(player, player.request_sent(now_s)) for player in players]

    def _receive(self, *, wait: bool) -> None:
        if self._pending is not None:
            future, sent = self._pending
            if wait or future.done():
                self._pending = None
                self._deliver(sent, future.result)

    def _deliver(self, sent: _Sent, answer: Callable[[], _TimedChunks]) -> None:
        """Give each player its row of an answer."""
        try:
            chunk, arrived_s = answer()
            columns = flatten(self._action_space, chunk)
            for row, (player, request) in enumerate(sent):
                player.chunk_arrived(request, tuple(column[row] for column in columns), arrived_s)
        except BaseException:
            for player, request in sent:
                player.request_failed(request)
            raise


def _rows_of(column: Column, lanes: list[int]) -> Column:
    if isinstance(column, np.ndarray):
        return column[lanes]
    return tuple(column[lane] for lane in lanes)


def _autoreset_mode(env: Any) -> str:
    mode = getattr(env, "autoreset_mode", None)  # of a contract, or a RemoteVectorEnv
    if mode is None and isinstance(env, gymnasium.vector.VectorEnv):
        mode = env.metadata.get("autoreset_mode")
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, gymnasium.wrappers.Autoreset):
            return AutoresetMode.NEXT_STEP.value
        env = env.env
    return str(getattr(mode, "value", ""))
