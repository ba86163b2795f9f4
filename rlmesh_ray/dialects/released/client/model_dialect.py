"""Client dialect of ``rlmesh-wire-v1`` for sessions with a policy; without I/O."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar
from uuid import uuid4

from rlmesh_ray import __version__
from rlmesh_ray.client.channel import CLIENT_NAME, HandshakeVariant
from rlmesh_ray.client.model.model_dialect import (
    EditionModelClientDialect,
    Encode,
    EncodedRequest,
    ModelReply,
    RouteBatch,
    action_of,
    telemetry_of,
)
from rlmesh_ray.dialects.released.protocol import (
    WIRE_V1,
    GroupedPredict,
    GroupedPredicted,
    accept_released_answer,
    make_released_offer,
)
from rlmesh_ray.dialects.released.wire import model as wire
from rlmesh_ray.dialects.released.wire import values
from rlmesh_ray.dialects.released.wire.model import NO_LANE
from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.messages import (
    ModelFailed,
    Predict,
    PredictContext,
    Predicted,
    PredictSlot,
    RouteConfigured,
)
from rlmesh_ray.protocol.model_session import ForgetEpisodes
from rlmesh_ray.spaces.batch import Column, split
from rlmesh_ray.spaces.contract import EnvContract


class RowEpisodes:
    """The episodes of one route."""

    def __init__(self) -> None:
        self._by_lane: dict[int, tuple[str, str]] = {}
        """The caller's id, which may be empty, and the id in requests. A server keeps the episodes
        of all its routes and sessions together: so that one is unique, and begins with the
        caller's."""

    def of(self, rows: Sequence[PredictSlot]) -> tuple[tuple[PredictSlot, ...], tuple[str, ...]]:
        """Return the slots to send for ``rows``, and the ids of episodes that they have replaced.

        A lane's episode lasts until a row of the lane is a first one, or has another id.
        """
        named: list[PredictSlot] = []
        replaced: list[str] = []
        for row in rows:
            given, name = self._by_lane.get(row.env_index, ("", ""))
            if not name or row.reset or row.episode_id != given:
                if name:
                    replaced.append(name)
                given, own = row.episode_id, uuid4().hex
                name = f"{given}-{own}" if given else own
                self._by_lane[row.env_index] = given, name
            named.append(PredictSlot(NO_LANE, name, 0, False))
        return tuple(named), tuple(replaced)


class ReleasedModelClientDialect(EditionModelClientDialect):
    """The dialect of one session: a route is an adapter, whose id is that of its environment.

    Args:
        session_id: The id in every context.
    """

    frames: ClassVar[Any] = wire

    def __init__(self, session_id: str) -> None:
        super().__init__(session_id)
        self._episodes: dict[str, RowEpisodes] = {}

    def predict(
        self,
        ids: Iterator[str],
        route_id: str,
        rows: Sequence[PredictSlot],
        observation: bytes,
    ) -> list[EncodedRequest]:
        """Return the request for a prediction, after one that reports ended episodes, if any.

        Released models may work on both at once, and some drop all states when any episode ends: so
        the report must be answered before the prediction is sent.
        """
        slots, asked = self._begin(ids, route_id, rows)
        return asked + super().predict(ids, route_id, slots, observation)

    def predict_chunk(
        self, ids: Iterator[str], route_id: str, batch: RouteBatch
    ) -> list[EncodedRequest]:
        """Return the request for chunks, with a group for each row, after ``predict``'s report.

        Released models choose chunks for one row at a time.
        """
        slots, asked = self._begin(ids, route_id, batch.rows)
        request_id = next(ids)
        groups = []
        for row, own in enumerate(split(batch.columns, [1] * len(slots))):
            own_slots = slots[row : row + 1]
            context = PredictContext(self.session_id, route_id, f"{request_id}.{row}", own_slots)
            groups.append(Predict(context.request_id, context, batch.encode(own, 1)))
        frame = wire.pack_request(GroupedPredict(request_id, tuple(groups)))
        return [*asked, EncodedRequest(request_id, frame)]

    def _begin(
        self, ids: Iterator[str], route_id: str, rows: Sequence[PredictSlot]
    ) -> tuple[tuple[PredictSlot, ...], list[EncodedRequest]]:
        slots, replaced = self._episodes.setdefault(route_id, RowEpisodes()).of(rows)
        if not replaced:
            return slots, []
        request_id = next(ids)
        context = PredictContext(self.session_id, route_id, request_id)
        frame = wire.pack_request(ForgetEpisodes(request_id, context, replaced))
        return slots, [EncodedRequest(request_id, frame)]

    def release(self, ids: Iterator[str], route_id: str) -> EncodedRequest:
        self._episodes.pop(route_id, None)
        return super().release(ids, route_id)

    def read(self, frame: bytes) -> ModelReply:
        response = wire.parse_response(frame)
        request_id = response.request_id
        match response:
            case ModelFailed():
                return ModelReply(request_id, response)
            case Predicted():
                return ModelReply(request_id, None, response.action, telemetry_of(response))
            case GroupedPredicted():
                return _of_groups(response)
            case RouteConfigured(horizon=horizon):
                return ModelReply(request_id, horizon=horizon or None)
        return ModelReply(request_id)

    def encoder(self, contract: EnvContract) -> Encode:
        return values.codec(contract.observation_space).encode

    def actions(
        self, contract: EnvContract, reply: ModelReply, num_rows: int, horizon: int = 1
    ) -> list[Column]:
        if horizon == 1:
            return values.decode_batch(contract.action_space, action_of(reply), num_rows)
        lengths = {len(chunk) for chunk in reply.chunks}
        if len(reply.chunks) != num_rows or len(lengths) != 1 or not 0 < max(lengths) <= horizon:
            raise CodecError(
                f"{num_rows} chunks of {horizon} actions at most were expected, and "
                f"{len(reply.chunks)} came, of {sorted(lengths)} actions; all rows of one request "
                "need chunks of one length"
            )
        steps = [action for step in zip(*reply.chunks, strict=True) for action in step]
        return values.codec(contract.action_space).join(steps, [1] * len(steps))


def _of_groups(response: GroupedPredicted) -> ModelReply:
    """Return the chunks of all rows; one failure is that of the whole request."""
    chunks, telemetry = [], None
    for result in response.results:
        if isinstance(result, ModelFailed):
            return ModelReply(response.request_id, replace(result, request_id=response.request_id))
        assert isinstance(result, Predicted)
        chunks.append((result.action, *result.later))
        telemetry = telemetry_of(result)
    return ModelReply(response.request_id, None, None, telemetry, tuple(chunks))


DIALECT = HandshakeVariant(
    WIRE_V1,
    wire.HANDSHAKE,
    make_released_offer(CLIENT_NAME, __version__, {}),
    accept_released_answer,
    ReleasedModelClientDialect,
)
