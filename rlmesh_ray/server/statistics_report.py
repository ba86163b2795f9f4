"""The frame with the statistics that an endpoint outside of Ray reports to its pool."""

from rlmesh_ray.errors import CodecError
from rlmesh_ray.histogram import DURATION_BOUNDS_NS, NS_PER_S, Histogram
from rlmesh_ray.server.statistics import EnvStatistics, SessionStatistics
from rlmesh_ray.wire._pb.rlmesh_ray.registry.v1 import service_pb2 as pb
from rlmesh_ray.wire.protobuf import as_utf8, parse

_BOUNDS_S = tuple(bound / NS_PER_S for bound in DURATION_BOUNDS_NS)
_MOST_NAMES = 64
_LONGEST_NAME = 64
_MOST = 2**53
"""Larger counts are refused; a float holds all smaller ones exactly."""


def pack_report(statistics: EnvStatistics) -> bytes:
    """Return the request with ``statistics``."""
    sessions = statistics.sessions
    report = pb.Report(
        version=as_utf8(statistics.version),
        uptime_s=statistics.uptime_s,
        sessions_open=sessions.open,
        sessions_opened=sessions.opened,
        sessions_refused=sessions.refused,
        sessions_lost=sessions.lost,
        steps=statistics.steps,
        lane_steps=statistics.lane_steps,
        resets=statistics.resets,
        episodes=statistics.episodes,
        worker_restarts=statistics.worker_restarts,
        deviations=statistics.deviations,
        transports=dict(statistics.transports),
        errors=dict(statistics.errors),
        steps_by_duration=statistics.step_s.counts,
        step_seconds=statistics.step_s.total,
    )
    return pb.AttendRequest(report=report).SerializeToString()


def parse_report(data: bytes) -> EnvStatistics:
    """Return the statistics in the request ``data``.

    Raises:
        CodecError: It has no report, or an impossible one.
    """
    message = parse(pb.AttendRequest, data)
    if not message.HasField("report"):
        raise CodecError("the request has no report")
    report = message.report
    counts = (
        *(report.sessions_open, report.sessions_opened),
        *(report.sessions_refused, report.sessions_lost),
        *(report.steps, report.lane_steps, report.resets, report.episodes),
        *(report.worker_restarts, report.deviations),
        *report.errors.values(),
        *report.transports.values(),
        *report.steps_by_duration,
    )
    seconds = (report.uptime_s, report.step_seconds)
    if not all(0 <= each < _MOST for each in (*counts, *seconds)):  # false for NaN
        raise CodecError("a number of the report is out of range")
    if len(report.steps_by_duration) != len(_BOUNDS_S) + 1:
        raise CodecError(f"the steps are not counted in {len(_BOUNDS_S) + 1} parts")
    for names in (report.errors, report.transports):
        if len(names) > _MOST_NAMES or not all(map(_is_name, names)):
            raise CodecError("the report has invalid names, or too many")
    return EnvStatistics(
        version=report.version[:_LONGEST_NAME],
        uptime_s=report.uptime_s,
        sessions=SessionStatistics(
            report.sessions_open,
            report.sessions_opened,
            report.sessions_refused,
            report.sessions_lost,
        ),
        steps=report.steps,
        lane_steps=report.lane_steps,
        resets=report.resets,
        episodes=report.episodes,
        errors=dict(report.errors),
        deviations=report.deviations,
        transports=dict(report.transports),
        worker_restarts=report.worker_restarts,
        step_s=Histogram(_BOUNDS_S, tuple(report.steps_by_duration), report.step_seconds),
    )


def _is_name(text: str) -> bool:
    return len(text) <= _LONGEST_NAME and text.isascii() and text.replace("_", "").isalnum()
