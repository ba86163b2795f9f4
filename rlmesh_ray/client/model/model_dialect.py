"""The dialects of a session with a ModelService: requests and answers, without I/O."""

import operator
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from rlmesh_ray.errors import ConformanceError, RemoteProtocolError
from rlmesh_ray.protocol.handshake import HandshakeResponse
from rlmesh_ray.protocol.messages import (
    CloseModel,
    CloseRoute,
    ConfigureRoute,
    ModelFailed,
    Predict,
    PredictContext,
    Predicted,
    PredictSlot,
)
from rlmesh_ray.spaces.batch import Column
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire import image_codec_v1
from rlmesh_ray.wire.rlmesh_v1 import model as wire
from rlmesh_ray.wire.rlmesh_v1 import values


@dataclass(frozen=True, slots=True)
class PredictTelemetry:
    """How an endpoint made a prediction."""

    policy_version: int
    """Version of the weights that chose; 0 for those that the policy was loaded with, -1 where the
    endpoint does not report it."""
    queue_s: float
    """Time from the request's arrival there to the beginning of its batch."""
    forward_s: float
    """Time that the policy took for the whole batch."""
    batch_rows: int
    """Rows in the batch, with those of other requests; 0 where the endpoint does not report it."""
    server: str
    """Identifies the running server; empty where it does not report it."""


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


class RouteBatch(NamedTuple):
    """Observations of a route, checked."""

    contract: EnvContract
    """The route's."""
    rows: Sequence[PredictSlot]
    """The slot of each row."""
    columns: Sequence[Column]
    """One for each leaf of the observation space."""


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """A request that is about to be sent."""

    request_id: str
    frame: bytes


@dataclass(frozen=True, slots=True)
class ModelReply:
    """An answer."""

    request_id: str
    failure: ModelFailed | None = None
    action: bytes | None = None
    """For a prediction: the data that ``ModelClientDialect.actions`` reads."""
    telemetry: PredictTelemetry | None = None
    chunks: tuple[tuple[bytes, ...], ...] = ()
    """For a prediction of chunks, in a dialect that keeps their actions apart: those of each
    row."""
    horizon: int | None = None
    """For an opened route: how many actions the policy chooses at once; None: not reported."""


Make = Callable[[Iterator[str]], Sequence[EncodedRequest]]
"""Makes requests, with ids from the front of those given."""


class RouteRequests(Protocol):
    """Makes the requests of a session's routes, and reads predictions.

    Methods take the ids of the requests that they make from the front of ``ids``.
    """

    def configure(
        self, ids: Iterator[str], route_id: str, contract: EnvContract, horizon: int = 1
    ) -> EncodedRequest:
        """Return the request to open a route; ``predict_chunk`` needs a horizon above 1."""

    def predict(
        self,
        ids: Iterator[str],
        route_id: str,
        rows: Sequence[PredictSlot],
        observation: bytes,
    ) -> list[EncodedRequest]:
        """Return the request for a prediction, after requests that must come before it."""

    def predict_chunk(
        self, ids: Iterator[str], route_id: str, batch: RouteBatch
    ) -> list[EncodedRequest]:
        """Return the request for a prediction of chunks, likewise.

        Raises:
            CodecError: The observations have no wire form.
        """

    def release(self, ids: Iterator[str], route_id: str) -> EncodedRequest:
        """Return the request to close a route."""

    def encode(self, contract: EnvContract, columns: Sequence[Column], num_rows: int) -> bytes:
        """Return the bytes of observations. In any thread, without the lock.

        Raises:
            CodecError: They have no wire form.
        """

    def actions(
        self, contract: EnvContract, reply: ModelReply, num_rows: int, horizon: int = 1
    ) -> list[Column]:
        """Return the actions of a prediction; arrays may be read-only. Without the lock, too.

        Those of chunks stand one row after the other of each step. There are as many steps as the
        columns have times ``num_rows`` rows: ``horizon``, or fewer where the policy has shorter
        chunks.

        Raises:
            CodecError: They are no actions of that route.
            RemoteProtocolError: It is the answer to another request.
        """


class ModelClientDialect(RouteRequests, Protocol):
    """Makes all requests of one session, and reads their answers. Used under the session's lock."""

    def close(self, ids: Iterator[str]) -> EncodedRequest:
        """Return the request to end the session."""

    def read(self, frame: bytes) -> ModelReply:
        """Return the answer in ``frame``.

        Raises:
            CodecError: It is none.
        """


class DialectModelSession(RouteRequests, Protocol):
    """A session of a dialect with a transport of its own: its ``MODEL_SESSION`` returns one.

    Safe to use from several threads.
    """

    answer: HandshakeResponse
    """The server's description of itself."""

    def ask(self, make: Make, timeout_s: float) -> ModelReply:
        """Send requests and return the last answer; see ``ModelSessionStream.ask``."""

    def close(self) -> None:
        """End the session. Idempotent."""


class EditionModelClientDialect:
    """The dialect of ``rlmesh.protocol.v1``.

    Args:
        session_id: Named in every context.
    """

    frames: ClassVar[Any] = wire
    """The wire module, which a dialect with the same messages replaces."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id

    def configure(
        self, ids: Iterator[str], route_id: str, contract: EnvContract, horizon: int = 1
    ) -> EncodedRequest:
        request_id = next(ids)
        request = ConfigureRoute(request_id, self._context(route_id, request_id), contract, horizon)
        return EncodedRequest(request_id, self.frames.pack_request(request))

    def predict(
        self,
        ids: Iterator[str],
        route_id: str,
        rows: Sequence[PredictSlot],
        observation: bytes,
    ) -> list[EncodedRequest]:
        request_id = next(ids)
        context = self._context(route_id, request_id, rows)
        return [
            EncodedRequest(
                request_id, self.frames.pack_request(Predict(request_id, context, observation))
            )
        ]

    def predict_chunk(
        self, ids: Iterator[str], route_id: str, batch: RouteBatch
    ) -> list[EncodedRequest]:
        """Return the request for a prediction of chunks: the route has their length."""
        data = self.encode(batch.contract, batch.columns, len(batch.rows))
        return self.predict(ids, route_id, batch.rows, data)

    def release(self, ids: Iterator[str], route_id: str) -> EncodedRequest:
        request_id = next(ids)
        request = CloseRoute(request_id, self._context(route_id, request_id))
        return EncodedRequest(request_id, self.frames.pack_request(request))

    def close(self, ids: Iterator[str]) -> EncodedRequest:
        request_id = next(ids)
        return EncodedRequest(request_id, self.frames.pack_request(CloseModel(request_id)))

    def read(self, frame: bytes) -> ModelReply:
        response = wire.parse_response(frame)
        if isinstance(response, ModelFailed):
            return ModelReply(response.request_id, response)
        if isinstance(response, Predicted):
            return ModelReply(response.request_id, None, response.action, telemetry_of(response))
        return ModelReply(response.request_id)

    def encode(self, contract: EnvContract, columns: Sequence[Column], num_rows: int) -> bytes:
        return image_codec_v1.observation_codec(contract).encode(columns, num_rows)

    def actions(
        self, contract: EnvContract, reply: ModelReply, num_rows: int, horizon: int = 1
    ) -> list[Column]:
        return values.decode_batch(contract.action_space, action_of(reply), num_rows * horizon)

    def _context(
        self, route_id: str, request_id: str, rows: Sequence[PredictSlot] = ()
    ) -> PredictContext:
        return PredictContext(self._session_id, route_id, request_id, tuple(rows))


def action_of(reply: ModelReply) -> bytes:
    """Return the reply in a prediction.

    Raises:
        RemoteProtocolError: It is the answer to another request.
    """
    if reply.action is None:
        raise RemoteProtocolError("the answer does not answer Predict", reply.request_id)
    return reply.action


def telemetry_of(predicted: Predicted) -> PredictTelemetry | None:
    run = predicted.run
    if run is None:
        return None
    return PredictTelemetry(
        policy_version=run.policy_version,
        queue_s=predicted.queue_ns * 1e-9,
        forward_s=run.forward_ns * 1e-9,
        batch_rows=run.num_rows,
        server=run.component_id,
    )


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
