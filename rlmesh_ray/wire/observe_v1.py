"""The frames of ObserverService: what others than a session's client may see of it."""

from collections.abc import Iterable
from dataclasses import dataclass

from rlmesh_ray.errors import CodecError
from rlmesh_ray.wire._pb.rlmesh_ray.observe.v1 import service_pb2 as pb
from rlmesh_ray.wire.protobuf import as_utf8, parse

SERVICE = "rlmesh_ray.observe.v1.ObserverService"
LIST = f"/{SERVICE}/List"
RENDER = f"/{SERVICE}/Render"


@dataclass(frozen=True, slots=True)
class ObservedSession:
    """What an endpoint tells of an open session, as it was after its last request."""

    name: str
    """That which the endpoint's log calls it by; it lets nobody in."""
    peer: str
    """Its client, as gRPC names it."""
    since_ns: int
    """When it began, since the epoch."""
    dialect: str
    """What its client speaks."""
    transport: str
    """What its steps travel by now: ``"grpc"``, ``"shared_memory"`` or ``"tcp"``."""
    episode_ids: tuple[str, ...]
    """One a lane; empty: none is tracked. It has ended, and what an autoreset begins is not
    tracked; the two others tell of the last one, then."""
    step_counts: tuple[int, ...]
    """Steps of each lane's episode."""
    cumulative_rewards: tuple[float, ...]
    """What it has earned."""
    num_steps: int
    """Vector steps that succeeded, since the session began."""
    num_lane_steps: int
    """Steps of single lanes."""
    num_resets: int
    num_episodes: int
    """That were seen to end."""
    num_deviations: int
    """Values out of range, or that have truncated an episode."""


_FIELDS = tuple(ObservedSession.__dataclass_fields__)
_COLUMNS = ("episode_ids", "step_counts", "cumulative_rewards")


def pack_list_request() -> bytes:
    """Return the frame that asks for the sessions."""
    return pb.ListRequest().SerializeToString()


def pack_sessions(sessions: Iterable[ObservedSession]) -> bytes:
    """Return the frame of ``sessions``."""
    messages = [
        pb.Session(**{name: getattr(session, name) for name in _FIELDS}) for session in sessions
    ]
    return pb.ListResponse(sessions=messages).SerializeToString()


def parse_sessions(data: bytes) -> tuple[ObservedSession, ...]:
    """Return the sessions in ``data``.

    Raises:
        CodecError: ``data`` is no such frame, or the numbers of lanes contradict each other.
    """
    return tuple(map(_session, parse(pb.ListResponse, data).sessions))


def _session(message: pb.Session) -> ObservedSession:
    fields = {name: getattr(message, name) for name in _FIELDS}
    fields |= {name: tuple(fields[name]) for name in _COLUMNS}
    if len({len(fields[name]) for name in _COLUMNS}) > 1:
        raise CodecError(f"the lanes of session {message.name!r:.40} are not one number everywhere")
    return ObservedSession(**fields)


def pack_render_request(name: str, lane: int) -> bytes:
    """Return the frame that asks for a picture of a session's lane.

    Raises:
        CodecError: ``lane`` does not fit its field.
    """
    try:
        return pb.RenderRequest(name=as_utf8(name), lane=lane).SerializeToString()
    except (TypeError, ValueError) as error:
        raise CodecError(f"no session has a lane {lane!r:.40}: {error}") from error


def parse_render_request(data: bytes) -> tuple[str, int]:
    """Return session and lane in ``data``.

    Raises:
        CodecError: ``data`` is no such frame.
    """
    message = parse(pb.RenderRequest, data)
    return message.name, message.lane


def pack_png(png: bytes) -> bytes:
    """Return the frame of a picture."""
    return pb.RenderResponse(png=png).SerializeToString()


def parse_png(data: bytes) -> bytes:
    """Return the picture in ``data``.

    Raises:
        CodecError: ``data`` is no such frame.
    """
    return parse(pb.RenderResponse, data).png
