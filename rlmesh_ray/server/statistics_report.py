"""Statistics in frames: the report of an endpoint to its pool, and what observers receive."""

from dataclasses import MISSING, asdict, fields
from typing import Any, get_type_hints

from rlmesh_ray.errors import CodecError
from rlmesh_ray.histogram import DURATION_BOUNDS_NS, NS_PER_S, Histogram
from rlmesh_ray.server.statistics import (
    EnvStatistics,
    ModelStatistics,
    SessionStatistics,
    Statistics,
)
from rlmesh_ray.wire._pb.rlmesh_ray.registry.v1 import service_pb2 as pb
from rlmesh_ray.wire.observe_v1 import EndpointStatistics
from rlmesh_ray.wire.protobuf import as_utf8, parse

_BOUNDS_S = tuple(bound / NS_PER_S for bound in DURATION_BOUNDS_NS)
_MOST_NAMES = 64
_LONGEST_NAME = 64
_LONGEST_TEXT = 400
_MOST = 2**53
"""Larger counts are refused; a float holds all smaller ones exactly."""


_KINDS: dict[str, type[Statistics]] = {"env": EnvStatistics, "model": ModelStatistics}


def observed_statistics(statistics: Statistics) -> EndpointStatistics:
    """Return ``statistics`` as observers receive them."""
    service = "env" if isinstance(statistics, EnvStatistics) else "model"
    return EndpointStatistics(service, asdict(statistics))


def statistics_of(observed: EndpointStatistics) -> Statistics | None:
    """Return the statistics that an observer has received; None: there are none yet.

    Raises:
        CodecError: They are not what this version knows.
    """
    kind = _KINDS.get(observed.service)
    if kind is None:
        return None
    try:
        hints, raw = get_type_hints(kind), observed.counters
        # An endpoint of an older version leaves out what has a default.
        names = [each.name for each in fields(kind) if each.default is MISSING or each.name in raw]
        return kind(**{name: _field(raw[name], hints[name]) for name in names})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        version = observed.counters.get("version")
        raise CodecError(
            f"the statistics of the endpoint, of version {version!r:.40}, are not understood "
            f"({type(error).__name__}: {error}); install versions that match"
        ) from error


def _field(value: Any, hint: Any) -> Any:
    """Return a field of statistics, from JSON."""
    if hint is Histogram:
        numbers = (_number(value["total"]), *map(_number, value["counts"]))
        return Histogram(tuple(map(_number, value["bounds"])), numbers[1:], numbers[0])
    if hint is SessionStatistics:
        return SessionStatistics(**{each.name: _number(value[each.name]) for each in fields(hint)})
    if hint is str:
        return str(value)[:_LONGEST_TEXT]
    if hint in (bool, int, float):
        return _number(value)
    return {str(name): _number(count) for name, count in value.items()}


def _number(value: Any) -> Any:
    if not isinstance(value, int | float) or not 0 <= value < _MOST:  # false for NaN
        raise ValueError(f"{value!r:.40} is no count")
    return value


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
