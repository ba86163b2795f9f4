"""The generation ``rlmesh-wire-v1`` within a session with a ModelService; without I/O."""

from collections.abc import Iterator, Sequence

from rlmesh_ray.client.model_tongue import Asked, Told, action_of
from rlmesh_ray.client.released.row_episodes import RowEpisodes
from rlmesh_ray.client.telemetry import PredictTelemetry
from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.adapter_messages import (
    AdapterContext,
    AdapterPredict,
    AdapterPredicted,
    AnyAdapterRequest,
    CloseParticipant,
    ModelTimings,
    ReleaseAdapter,
    ResetAdapter,
    ResolveAdapter,
)
from rlmesh_ray.protocol.generations import EDITION_NAME
from rlmesh_ray.protocol.messages import ModelFailed, PredictSlot
from rlmesh_ray.spaces.batch import Column
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire.rlmesh_wire_v1 import model as wire
from rlmesh_ray.wire.rlmesh_wire_v1 import values


class ReleasedModelTongue:
    """That of the released rlmesh: a route is an adapter there, known by its environment's id.

    Args:
        session_id: Named in every context.
    """

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._episodes: dict[str, RowEpisodes] = {}

    def configure(self, ids: Iterator[str], route_id: str, contract: EnvContract) -> Asked:
        """Return the request to open a route."""
        self._episodes.setdefault(route_id, RowEpisodes())
        context = self._context(route_id, next(ids))
        return _asked(ResolveAdapter(context.request_id, context, contract, EDITION_NAME))

    def predict(
        self,
        ids: Iterator[str],
        route_id: str,
        rows: Sequence[PredictSlot],
        observation: bytes,
    ) -> list[Asked]:
        """Return the request for a prediction, and before it which episodes are over.

        Released models may work on both at once, and some forget everything when any episode is
        over: so that must have been answered before the prediction is asked for.
        """
        episodes, replaced = self._episodes.setdefault(route_id, RowEpisodes()).of(rows)
        asked = []
        if replaced:
            context = self._context(route_id, next(ids))
            asked.append(_asked(ResetAdapter(context.request_id, context, replaced)))
        context = self._context(route_id, next(ids))
        asked.append(_asked(AdapterPredict(context.request_id, context, observation, episodes)))
        return asked

    def release(self, ids: Iterator[str], route_id: str) -> Asked:
        """Return the request to close a route."""
        self._episodes.pop(route_id, None)
        context = self._context(route_id, next(ids))
        return _asked(ReleaseAdapter(context.request_id, context))

    def close(self, ids: Iterator[str]) -> Asked:
        """Return the request to end the session."""
        return _asked(CloseParticipant(next(ids)))

    def read(self, frame: bytes) -> Told:
        """Return the answer in ``frame``."""
        response = wire.parse_response(frame)
        if isinstance(response, ModelFailed):
            return Told(response.request_id, response)
        if not isinstance(response, AdapterPredicted):
            return Told(response.request_id)
        if not response.actions:
            raise CodecError("a prediction holds no actions")
        telemetry = _telemetry(wire.parse_timings(frame))
        return Told(response.request_id, None, response.actions[0], telemetry)

    def encode(self, contract: EnvContract, columns: Sequence[Column], num_rows: int) -> bytes:
        """Return the bytes of observations."""
        return values.encode_batch(contract.observation_space, columns, num_rows)

    def actions(self, contract: EnvContract, told: Told, num_rows: int) -> list[Column]:
        """Return the actions of a prediction, for this step alone."""
        return values.decode_batch(contract.action_space, action_of(told), num_rows)

    def _context(self, route_id: str, request_id: str) -> AdapterContext:
        return AdapterContext(self._session_id, route_id, request_id)


def _asked(request: AnyAdapterRequest) -> Asked:
    return Asked(request.request_id, wire.pack_request(request))


def _telemetry(timings: ModelTimings) -> PredictTelemetry | None:
    if timings.queue_ns is None or timings.user_ns is None:
        return None
    return PredictTelemetry(
        policy_version=-1,
        queue_s=timings.queue_ns * 1e-9,
        forward_s=timings.user_ns * 1e-9,
        batch_rows=0,
        server="",
    )
