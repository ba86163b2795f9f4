"""The frames of ObserverService: sessions and statistics of an endpoint, for observers.

Functions that parse raise CodecError.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlmesh_ray.errors import CodecError
from rlmesh_ray.wire._pb.rlmesh_ray.observe.v1 import service_pb2 as pb
from rlmesh_ray.wire.protobuf import as_utf8, parse

SERVICE = "rlmesh_ray.observe.v1.ObserverService"
LIST = f"/{SERVICE}/List"
RENDER = f"/{SERVICE}/Render"
STATISTICS = f"/{SERVICE}/Statistics"


@dataclass(frozen=True, slots=True)
class ObservedSession:
    """Session: state and counts of an open session after its last request."""

    name: str
    """Name of the session in the endpoint's log; not its session id, and no credential."""
    peer: str
    """gRPC's peer string of the client."""
    since_ns: int
    """Start of the session, since the epoch."""
    dialect: str
    """Dialect of the client."""
    transport: str
    """Present transport of steps: ``"grpc"``, ``"shared_memory"`` or ``"tcp"``."""
    episode_ids: tuple[str, ...]
    """Id of each lane's tracked episode; empty where none is tracked: the last one has ended, and
    its counts follow."""
    step_counts: tuple[int, ...]
    """Steps of each lane's episode."""
    cumulative_rewards: tuple[float, ...]
    """Sum of the rewards of each lane's episode."""
    num_steps: int
    """Successful vector steps of the session."""
    num_lane_steps: int
    """Successful steps of single lanes."""
    num_resets: int
    num_episodes: int
    """Ended episodes."""
    num_deviations: int
    """Values that were out of range, or truncated an episode."""


@dataclass(frozen=True, slots=True)
class EndpointStatistics:
    """Statistics of an endpoint since its start."""

    service: str
    """``"env"`` or ``"model"``; empty: the endpoint has not reported any yet."""
    counters: Mapping[str, Any]
    """The fields of ``EnvStatistics`` or ``ModelStatistics``, as JSON has them."""
    endpoint_id: str = ""
    """Id in its pool; empty: the endpoint itself has answered, not a pool's registrar."""
    address: str = ""
    """Address for clients of an endpoint of a pool; else empty."""
    incarnation: int = 0
    """Number of registrations of an endpoint of a pool; else 0."""


_FIELDS = tuple(ObservedSession.__dataclass_fields__)
_COLUMNS = ("episode_ids", "step_counts", "cumulative_rewards")


def pack_sessions(sessions: Iterable[ObservedSession]) -> bytes:
    messages = [
        pb.Session(**{name: getattr(session, name) for name in _FIELDS}) for session in sessions
    ]
    return pb.ListResponse(sessions=messages).SerializeToString()


def parse_sessions(data: bytes) -> tuple[ObservedSession, ...]:
    return tuple(map(_session, parse(pb.ListResponse, data).sessions))


def _session(message: pb.Session) -> ObservedSession:
    fields = {name: getattr(message, name) for name in _FIELDS}
    fields |= {name: tuple(fields[name]) for name in _COLUMNS}
    if len({len(fields[name]) for name in _COLUMNS}) > 1:
        raise CodecError(f"session {message.name!r:.40} has several numbers of lanes")
    return ObservedSession(**fields)


def pack_render_request(name: str, lane: int) -> bytes:
    """Return the RenderRequest for a session's lane; raises CodecError for one beyond its field."""
    try:
        return pb.RenderRequest(name=as_utf8(name), lane=lane).SerializeToString()
    except (TypeError, ValueError) as error:
        raise CodecError(f"no session has a lane {lane!r:.40}: {error}") from error


def parse_render_request(data: bytes) -> tuple[str, int]:
    message = parse(pb.RenderRequest, data)
    return message.name, message.lane


def pack_png(png: bytes) -> bytes:
    return pb.RenderResponse(png=png).SerializeToString()


def parse_png(data: bytes) -> bytes:
    return parse(pb.RenderResponse, data).png


def pack_statistics(endpoints: Iterable[EndpointStatistics]) -> bytes:
    messages = [
        pb.EndpointStatistics(
            endpoint_id=each.endpoint_id,
            address=each.address,
            incarnation=each.incarnation,
            service=each.service,
            counters=json.dumps(each.counters),
        )
        for each in endpoints
    ]
    return pb.StatisticsResponse(endpoints=messages).SerializeToString()


def parse_statistics(data: bytes) -> tuple[EndpointStatistics, ...]:
    return tuple(map(_statistics, parse(pb.StatisticsResponse, data).endpoints))


def _statistics(message: pb.EndpointStatistics) -> EndpointStatistics:
    try:
        counters = json.loads(message.counters)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"the statistics are no JSON: {error}") from error
    if not isinstance(counters, dict):
        raise CodecError("the statistics are JSON, but no object")
    return EndpointStatistics(
        message.service, counters, message.endpoint_id, message.address, message.incarnation
    )
