"""RemoteModel: a served policy, from anywhere."""

import operator
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import Field, dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from rlmesh_ray.auth.client_tls import ClientTlsSource
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.fork_guard import NotPicklable
from rlmesh_ray.client.join_stream import JoinStream, open_call
from rlmesh_ray.client.model_dialect import (
    Make,
    ModelReply,
    ModelRequests,
    PredictTelemetry,
    RouteBatch,
    RouteRequests,
)
from rlmesh_ray.client.model_handshake import (
    compressed,
    handshake,
    horizon_of,
    open_dialect_session,
    shake_hands,
)
from rlmesh_ray.client.model_session_stream import ModelSessionStream
from rlmesh_ray.errors import ConfigurationError, ConformanceError, LocalProtocolError
from rlmesh_ray.options import (
    DEFAULT_STEP_TIMEOUT_S,
    as_horizon,
    require_seconds,
    takes_no_more,
)
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.batch import Column, unflatten
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.gym_conversion import contract_of
from rlmesh_ray.spaces.observation_map import ObservationMap, as_observation_map
from rlmesh_ray.spaces.spec import SpaceSpec
from rlmesh_ray.spaces.validation import coerce_batch

if TYPE_CHECKING:
    from rlmesh_ray.client.action_player import ActionPlayer
    from rlmesh_ray.client.chunk_player import Blend

__all__ = ["PredictTelemetry", "RemoteModel", "Slots", "contract_of", "shake_hands"]

_JOIN = "/rlmesh.model.v1.ModelService/Join"

DEFAULT_ROUTE = "default"
_ToColumns = Callable[[Any, int], list[Column]]
"""Makes the columns to send from a batch of observations and the number of its rows."""
_RESIZE_BY_THE_MAP = "give sizes in the observation_map, such as 'image=resize(camera,224,224)'"
_SHOWN_CHARACTERS = 100
"""Of a route's id, in the name of the route for its chunks: ids have a longest length."""


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
        """Return them in the protocol's form.

        Raises:
            ConformanceError: The fields have not as many entries as each other, or one is not what
                its field takes.
        """
        lengths = {field.name: _length(getattr(self, field.name), field) for field in fields(self)}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{count} {name}" for name, count in lengths.items())
            raise ConformanceError("structure", "slots", f"{counts}; give one of each for each row")
        lanes, ids, steps, resets = self.env_indices, self.episode_ids, self.steps, self.resets
        if not (_are(int, lanes) and _are(str, ids) and _are(int, steps) and _are(bool, resets)):
            lanes, steps = _counts("env_indices", lanes), _counts("steps", steps)
            ids, resets = _each("episode_ids", ids, str), _each("resets", resets, bool, np.bool_)
        if steps and min(steps) < 0:
            raise ConformanceError("structure", "slots.steps", f"{min(steps)} is below 0")
        return tuple(PredictSlot(*row) for row in zip(lanes, ids, steps, resets, strict=True))


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
        self._contracts: dict[str, EnvContract] = {}
        self._columns: dict[str, _ToColumns] = {}
        self._horizons: dict[str, int] = {}
        self._names: dict[str, dict[bool, str]] = {}
        """By route id: the server's routes that are used, by whether chunks are asked for there."""
        self._chunk_lock = threading.Lock()
        self._telemetry: dict[str, PredictTelemetry] = {}
        self._dialect: RouteRequests
        self._session_stream: ModelRequests
        session = open_dialect_session(self._connect_options)
        if session is not None:
            self.answer = session.answer
            self._dialect = self._session_stream = session
            return
        channel = self._connect_options.open()
        try:
            variant, self.answer = handshake(self._connect_options, channel)
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
            contract = compressed(contract, image_codec, self.answer, self.address)
        if mapping is not None:
            to_columns = partial(_mapped, own_space, mapping, to_columns)
        reply = self._session_stream.ask(
            lambda ids: [self._dialect.configure(ids, route_id, contract)], self._timeout_s
        )
        known = reply.horizon or horizon_of(self.answer)
        try:
            self._require_chosen(wanted, known)
        except ConfigurationError:
            before, dialect = self._contracts.get(route_id), self._dialect
            self._session_stream.ask(
                lambda ids: [
                    dialect.configure(ids, route_id, before)
                    if before
                    else dialect.release(ids, route_id)
                ],
                self._timeout_s,
            )
            if before and True in self._names[route_id]:
                self._names[route_id][False] = route_id
            raise
        self._close_chunks(route_id)
        self._names[route_id] = {}
        self._contracts[route_id], self._horizons[route_id] = contract, wanted or known or 1
        self._columns[route_id] = to_columns
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
        batch = self._checked(observation, route_id, slots)
        actions = self._actions(route_id, batch)
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
        batch = self._checked(observation, route_id, slots)
        contract, num_rows, horizon = batch.contract, len(batch.rows), self._horizons[route_id]
        if horizon == 1:
            steps = self._actions(route_id, batch)
        else:
            name = self._route(route_id, contract, horizon)
            reply = self._ask(route_id, lambda ids: self._dialect.predict_chunk(ids, name, batch))
            steps = self._dialect.actions(contract, reply, num_rows, horizon)
        return unflatten(contract.action_space, [_by_row(each, num_rows) for each in steps])

    def _actions(self, route_id: str, batch: RouteBatch) -> list[Column]:
        """Return one action a row; arrays may be read-only."""
        contract, rows, columns = batch
        name = self._route(route_id, contract, 1)
        data = self._dialect.encode(contract, columns, len(rows))
        reply = self._ask(route_id, lambda ids: self._dialect.predict(ids, name, rows, data))
        return self._dialect.actions(contract, reply, len(rows))

    def _ask(self, route_id: str, make: Make) -> ModelReply:
        """Send a prediction of a route, and keep its telemetry."""
        reply = self._session_stream.ask(make, self._timeout_s)
        if reply.telemetry is not None:
            self._telemetry[route_id] = reply.telemetry
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
        prefetch: "int | str" = "auto",
        blend: "Blend" = "newest",
    ) -> "ActionPlayer":
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
        from rlmesh_ray.client.action_player import ActionPlayer  # which needs this module

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

    def _checked(self, observation: Any, route_id: str, slots: Slots | None) -> RouteBatch:
        """Return the observation as the dialects take it."""
        contract, to_columns = self._contracts.get(route_id), self._columns.get(route_id)
        if contract is None or to_columns is None:
            raise LocalProtocolError(f"route {route_id!r} is not configured; configure_route first")
        if not isinstance(slots, Slots | None):
            problem = f"is a {type(slots).__name__}, expected rlmesh_ray.Slots"
            raise ConformanceError("structure", "slots", problem)
        rows = slots.rows() if slots else _all_lanes(contract.num_envs)
        return RouteBatch(contract, rows, to_columns(observation, len(rows)))

    def _route(self, route_id: str, contract: EnvContract, horizon: int) -> str:
        """Return the server's route for one action or for chunks, which is opened if need be.

        The route of ``configure_route`` is closed if chunks are asked for first: a server with a
        ``max_delay_s`` would have each batch wait for it.
        """
        names, has_chunks = self._names.get(route_id, {}), horizon > 1
        if has_chunks in names:
            return names[has_chunks]
        with self._chunk_lock:
            if has_chunks not in names:
                name = route_id
                if has_chunks:
                    name = f"{route_id[:_SHOWN_CHARACTERS]}-chunks-{uuid.uuid4().hex}"
                if names or has_chunks:
                    self._session_stream.ask(
                        lambda ids: [self._dialect.configure(ids, name, contract, horizon)],
                        self._timeout_s,
                    )
                if not names and has_chunks:
                    self._release(route_id)
                names[has_chunks] = name
            return names[has_chunks]

    def _close_chunks(self, route_id: str) -> None:
        """Close the route for chunks beside a route, if there is one."""
        with self._chunk_lock:
            name = self._names.get(route_id, {}).pop(True, None)
        if name is not None:
            self._release(name)

    def _release(self, name: str) -> None:
        """Close a route of the server."""
        self._session_stream.ask(lambda ids: [self._dialect.release(ids, name)], self._timeout_s)

    def last_telemetry(self, route_id: str = DEFAULT_ROUTE) -> PredictTelemetry | None:
        """Return how the route's latest prediction was made.

        None before the first one, and when the endpoint reports nothing. Endpoints of rlmesh-ray
        report everything, those of the released rlmesh only the times.
        """
        return self._telemetry.get(route_id)

    def close_route(self, route_id: str = DEFAULT_ROUTE) -> None:
        """Release a route and the state that the policy keeps for it."""
        contract = self._contracts.get(route_id)
        for name in {*self._names.get(route_id, {}).values()} or {route_id}:
            self._release(name)
        # Another thread may have configured it anew already.
        if self._contracts.get(route_id) is contract:
            self._contracts.pop(route_id, None)
            self._columns.pop(route_id, None)
            self._names.pop(route_id, None)
            self._telemetry.pop(route_id, None)

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
    """Return the columns to send of an environment's observations, in its own space."""
    columns = coerce_batch(space, observation, num_rows)
    return to_columns(mapping.apply(unflatten(space, columns)), num_rows)


def _are(kind: type, entries: Sequence[object]) -> bool:
    """Return whether all have exactly that type; fast, since each prediction calls it."""
    return set(map(type, entries)) <= {kind}


def _length(entries: object, field: "Field[Any]") -> int:
    if isinstance(entries, str) or not isinstance(entries, Sized):
        problem = f"is a {type(entries).__name__}, expected a sequence with one entry a row"
        raise ConformanceError("structure", f"slots.{field.name}", problem)
    return len(entries)


def _counts(name: str, entries: Sequence[Any]) -> list[int]:
    """Return the entries as Python's integers, those of NumPy and torch, too.

    Raises:
        ConformanceError: One is none.
    """
    counts = []
    for entry in entries:
        try:
            counts.append(operator.index(entry))
        except TypeError as error:
            raise _misfit(name, entry, int) from error
    return counts


def _each(name: str, entries: Sequence[Any], *kinds: type) -> list[Any]:
    """Return the entries in Python's own types, the first of ``kinds``.

    Raises:
        ConformanceError: One is of none of ``kinds``.
    """
    for entry in entries:
        if not isinstance(entry, kinds):
            raise _misfit(name, entry, kinds[0])
    return [kinds[0](entry) for entry in entries]


def _misfit(name: str, entry: object, wanted: type) -> ConformanceError:
    problem = f"{entry!r:.40} is a {type(entry).__name__}, expected {wanted.__name__}"
    return ConformanceError("structure", f"slots.{name}", problem)


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


def _all_lanes(num_lanes: int) -> tuple[PredictSlot, ...]:
    return tuple(PredictSlot(lane, "", 0, False) for lane in range(num_lanes))
