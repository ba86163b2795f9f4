"""The dialects of a session with a ModelService: requests and answers, without I/O."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

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
    """Which lanes and episodes the rows of a batch belong to; every field one entry per row."""

    env_indices: Sequence[int]
    episode_ids: Sequence[str]
    steps: Sequence[int]
    """Steps done in the episode so far."""
    resets: Sequence[bool]
    """Whether the row is the first observation of its episode."""

    def rows(self) -> tuple[PredictSlot, ...]:
        """Return them in the protocol's form.

        Raises:
            ConformanceError: The fields differ in length, or an entry has a wrong type or value.
        """
        lanes = _entries("env_indices", self.env_indices, int)
        ids = _entries("episode_ids", self.episode_ids, str)
        steps = _entries("steps", self.steps, int)
        resets = _entries("resets", self.resets, bool)
        if not len(lanes) == len(ids) == len(steps) == len(resets):
            counts = (
                f"{len(lanes)} env_indices, {len(ids)} episode_ids, {len(steps)} steps, "
                f"{len(resets)} resets"
            )
            raise ConformanceError("structure", "slots", f"{counts}; give one of each for each row")
        if steps and min(steps) < 0:
            raise ConformanceError("structure", "slots.steps", f"{min(steps)} is below 0")
        return tuple(PredictSlot(*row) for row in zip(lanes, ids, steps, resets, strict=True))


Encode = Callable[[Sequence[Column], int], bytes]
"""Encodes columns of a number of rows; raises CodecError if they have no wire form."""


class RouteBatch(NamedTuple):
    """Observations of a route, checked."""

    encode: Encode
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


class ModelReply(NamedTuple):
    """An answer."""

    request_id: str
    failure: ModelFailed | None = None
    action: bytes | None = None
    """For a prediction: the data that ``actions`` of the dialect reads."""
    telemetry: PredictTelemetry | None = None
    chunks: tuple[tuple[bytes, ...], ...] = ()
    """For a prediction of chunks, in a dialect that keeps their actions apart: those of each
    row."""
    horizon: int | None = None
    """For an opened route: how many actions the policy chooses at once; None: not reported."""


Make = Callable[[Iterator[str]], Sequence[EncodedRequest]]
"""Makes requests, with ids from the front of those given."""


class EditionModelClientDialect:
    """The dialect of ``rlmesh.protocol.v1``: all requests of one session, and their answers.

    Methods that make requests take their ids from the front of ``ids``. Used under the session's
    lock, except for ``encoder`` and ``actions``.

    Args:
        session_id: Named in every context.
    """

    frames: ClassVar[Any] = wire
    """The wire module, which a dialect with the same messages replaces."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id

    def configure(
        self, ids: Iterator[str], route_id: str, contract: EnvContract, horizon: int = 1
    ) -> EncodedRequest:
        """Return the request to open a route; ``predict_chunk`` needs a horizon above 1."""
        request_id = next(ids)
        context = PredictContext(self.session_id, route_id, request_id)
        request = ConfigureRoute(request_id, context, contract, horizon)
        return EncodedRequest(request_id, self.frames.pack_request(request))

    def predict(
        self,
        ids: Iterator[str],
        route_id: str,
        rows: Sequence[PredictSlot],
        observation: bytes,
    ) -> list[EncodedRequest]:
        """Return the request for a prediction, after requests that must come before it."""
        request_id = next(ids)
        context = PredictContext(self.session_id, route_id, request_id, tuple(rows))
        request = Predict(request_id, context, observation)
        return [EncodedRequest(request_id, self.frames.pack_request(request))]

    def predict_chunk(
        self, ids: Iterator[str], route_id: str, batch: RouteBatch
    ) -> list[EncodedRequest]:
        """Return the request for a prediction of chunks: the route has their length."""
        data = batch.encode(batch.columns, len(batch.rows))
        return self.predict(ids, route_id, batch.rows, data)

    def release(self, ids: Iterator[str], route_id: str) -> EncodedRequest:
        request_id = next(ids)
        request = CloseRoute(request_id, PredictContext(self.session_id, route_id, request_id))
        return EncodedRequest(request_id, self.frames.pack_request(request))

    def end(self, ids: Iterator[str]) -> EncodedRequest:
        """Return the request to close the session."""
        request_id = next(ids)
        return EncodedRequest(request_id, self.frames.pack_request(CloseModel(request_id)))

    def read(self, frame: bytes) -> ModelReply:
        """Return the answer in ``frame``; raises CodecError if it is malformed."""
        response = wire.parse_response(frame)
        if isinstance(response, ModelFailed):
            return ModelReply(response.request_id, response)
        if isinstance(response, Predicted):
            return ModelReply(response.request_id, None, response.action, telemetry_of(response))
        return ModelReply(response.request_id)

    def encoder(self, contract: EnvContract) -> Encode:
        """Return the function that encodes the observations of a route."""
        return image_codec_v1.observation_codec(contract).encode

    def actions(
        self, contract: EnvContract, reply: ModelReply, num_rows: int, horizon: int = 1
    ) -> list[Column]:
        """Return the actions of a prediction; arrays may be read-only.

        With chunks, each column has ``num_rows`` rows for the first step, then as many for the
        second, and so on: for ``horizon`` steps, or fewer where the policy has shorter chunks.

        Raises:
            CodecError: The actions do not fit the route's action space.
            RemoteProtocolError: The reply answers another kind of request.
        """
        codec = values.codec(contract.action_space)
        return codec.decode(action_of(reply), num_rows * horizon)


class DialectModelSession(EditionModelClientDialect, ABC):
    """A session over another transport than gRPC; the dialect's ``MODEL_SESSION`` opens it.

    It also makes its own requests. Safe to use from several threads.
    """

    answer: HandshakeResponse
    """The server's description of itself."""

    @abstractmethod
    def ask(self, make: Make, timeout_s: float) -> ModelReply:
        """Send requests and return the last answer; see ``ModelSessionStream.ask``."""

    @abstractmethod
    def close(self) -> None:
        """End the session. Idempotent."""


def action_of(reply: ModelReply) -> bytes:
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


def _entries(name: str, given: Sequence[Any], kind: type) -> Sequence[Any]:
    """Return the entries of a field of ``Slots`` as Python's own types."""
    if isinstance(given, str) or not isinstance(given, Sized):
        problem = f"is a {type(given).__name__}, expected a sequence with one entry per row"
        raise ConformanceError("structure", f"slots.{name}", problem)
    if set(map(type, given)) <= {kind}:  # fast, since each prediction comes here
        return given
    return [_entry(name, each, kind) for each in given]


def _entry(name: str, entry: Any, kind: type) -> Any:
    try:
        if kind is int:  # those of NumPy and torch, too
            return operator.index(entry)
        if isinstance(entry, kind) or (kind is bool and isinstance(entry, np.bool_)):
            return kind(entry)
    except TypeError:
        pass
    problem = f"{entry!r:.40} is a {type(entry).__name__}, expected {kind.__name__}"
    raise ConformanceError("structure", f"slots.{name}", problem)
