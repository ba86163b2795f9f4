"""Statistics in frames: the report of an endpoint to its pool, and what observers receive.

Peers of other versions are understood: a field with a default may be missing, and unknown fields
are ignored.
"""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any, TypeVar, get_type_hints

from rlmesh_ray.errors import CodecError
from rlmesh_ray.histogram import DURATION_BOUNDS_NS, NS_PER_S, Histogram
from rlmesh_ray.server.observe.statistics import (
    EnvStatistics,
    ModelStatistics,
    SessionStatistics,
    Statistics,
    snapshot,
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
_KINDS: dict[str, type[Statistics]] = {
    each.service: each for each in (EnvStatistics, ModelStatistics)
}
_SCHEMA = frozenset(pb.Report.DESCRIPTOR.fields_by_name) - {"others"}

StatisticsT = TypeVar("StatisticsT", EnvStatistics, ModelStatistics, Statistics)


def observed_statistics(statistics: Statistics) -> EndpointStatistics:
    return EndpointStatistics(statistics.service, asdict(statistics))


def statistics_of(observed: EndpointStatistics) -> Statistics | None:
    """Return the statistics that an observer has received, or raise a CodecError.

    None: there are none yet.
    """
    kind = _KINDS.get(observed.service)
    return None if kind is None else _checked(kind, observed.counters)


def pack_report(statistics: EnvStatistics) -> bytes:
    values = snapshot(statistics)
    steps: Histogram = values.pop("step_s")
    values["version"] = as_utf8(statistics.version)
    report = pb.Report(
        **{name: value for name, value in values.items() if name in _SCHEMA},
        steps_by_duration=steps.counts,
        step_seconds=steps.total,
        others={name: value for name, value in values.items() if name not in _SCHEMA},
    )
    return pb.AttendRequest(report=report).SerializeToString()


def parse_report(data: bytes) -> EnvStatistics:
    """Return the statistics in a request; CodecError: it has none, or impossible ones."""
    message = parse(pb.AttendRequest, data)
    if not message.HasField("report"):
        raise CodecError("the request has no report")
    report = message.report
    values = {**report.others, **{name: getattr(report, name) for name in _SCHEMA}}
    sessions = {
        name.removeprefix("sessions_"): value
        for name, value in values.items()
        if name.startswith("sessions_")
    }
    steps = {
        "bounds": _BOUNDS_S,
        "counts": report.steps_by_duration,
        "total": report.step_seconds,
    }
    return _checked(EnvStatistics, {**values, "sessions": sessions, "step_s": steps})


def _checked(kind: type[StatisticsT], values: Mapping[str, Any]) -> StatisticsT:
    try:
        statistics: StatisticsT = _record(kind, values)
        return statistics
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CodecError(
            f"the statistics of the endpoint, of version {values.get('version')!r:.40}, are not "
            f"understood ({type(error).__name__}: {error}); install versions that match"
        ) from error


def _record(kind: Any, values: Mapping[str, Any]) -> Any:
    hints, given = get_type_hints(kind), dict(values)
    names = [each.name for each in fields(kind) if each.default is MISSING or each.name in given]
    return kind(**{name: _field(given[name], hints[name]) for name in names})


def _field(value: Any, hint: Any) -> Any:
    if hint is Histogram:
        total, *counts = (_number(value["total"]), *map(_number, value["counts"]))
        bounds = tuple(map(_number, value["bounds"]))
        if len(counts) != len(bounds) + 1:
            raise ValueError(f"the values are not counted in {len(bounds) + 1} parts")
        return Histogram(bounds, tuple(counts), total)
    if hint is SessionStatistics:
        return _record(SessionStatistics, value)
    if hint is str:
        return str(value)[:_LONGEST_TEXT]
    if hint in (bool, int, float):
        return hint(_number(value))
    if len(value) > _MOST_NAMES or not all(map(_is_name, value.keys())):
        raise ValueError("invalid names, or too many")
    return {name: _number(count) for name, count in value.items()}


def _number(value: Any) -> Any:
    if not isinstance(value, int | float) or not 0 <= value < _MOST:  # false for NaN
        raise ValueError(f"{value!r:.40} is out of range")
    return value


def _is_name(text: str) -> bool:
    return len(text) <= _LONGEST_NAME and text.isascii() and text.replace("_", "").isalnum()
