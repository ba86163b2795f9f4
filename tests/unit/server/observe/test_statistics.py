"""One table of metrics: what stands in a field's annotation is in every form of the statistics."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.watching.samples import env_statistics, model_statistics
from rlmesh_ray.errors import CodecError
from rlmesh_ray.histogram import Histogram
from rlmesh_ray.server.observe import statistics_report
from rlmesh_ray.server.observe.endpoint_status import EndpointStatus, as_fields
from rlmesh_ray.server.observe.metrics_server import StatisticsCollector
from rlmesh_ray.server.observe.statistics import (
    EnvStatistics,
    MeasuredEndpoint,
    Metric,
    MetricKind,
    ModelStatistics,
    SessionStatistics,
    Statistics,
    StatisticsPair,
    metrics_of,
    series_of,
    snapshot,
)
from rlmesh_ray.server.observe.statistics_report import (
    observed_statistics,
    pack_report,
    parse_report,
    statistics_of,
)
from rlmesh_ray.wire._pb.rlmesh_ray.registry.v1 import service_pb2 as pb
from rlmesh_ray.wire.protobuf import varint

NO_METRICS = {"version", "torch_reason"} | {
    *("rows_waiting", "is_busy", "cancelled", "waited_s", "longest_wait_s", "busy_s")
}


@dataclass(frozen=True, slots=True)
class LaterEnvStatistics(EnvStatistics):
    """Statistics of a later version, which has one more metric."""

    thefts: Annotated[
        int, Metric("rlmesh_ray_env_thefts", MetricKind.COUNTER, "Stolen pictures.")
    ] = 0


def later(thefts: int) -> LaterEnvStatistics:
    plain = env_statistics(steps=100, uptime_s=20.0)
    return LaterEnvStatistics(
        **{each.name: getattr(plain, each.name) for each in fields(plain)}, thefts=thefts
    )


EACH: list[EnvStatistics | ModelStatistics] = [
    replace(
        env_statistics(steps=100, uptime_s=20.0),
        sessions=SessionStatistics(2, 3, 4, 5),
        errors={"TIMEOUT": 6},
        deviations=7,
        worker_restarts=8,
    ),
    replace(
        model_statistics(batches=9, uptime_s=30.0),
        sessions=SessionStatistics(2, 3, 4, 5),
        errors={"TIMEOUT": 6},
        inference="compiled",
    ),
    later(11),
]


def scraped(statistics: Statistics) -> str:
    registry = CollectorRegistry()
    registry.register(StatisticsCollector(lambda: [MeasuredEndpoint("e", statistics)]))
    return generate_latest(registry).decode()


def status(statistics: Statistics) -> dict[str, Any]:
    pair = StatisticsPair(statistics)
    return as_fields(EndpointStatus("", "e", "", "127.0.0.1:1", 0, 1.0, False, 0, pair))


@pytest.mark.parametrize("statistics", EACH, ids=lambda each: type(each).__name__)
def test_each_metric_is_scraped_shown_and_observed(statistics: Statistics) -> None:
    text, shown, values = scraped(statistics), status(statistics), snapshot(statistics)
    found = statistics_of(observed_statistics(statistics))
    assert found is not None

    for name, metric in metrics_of(type(statistics)).items():
        assert f"# TYPE {metric.exported} {metric.kind.name.lower()}\n" in text
        assert f"# HELP {metric.exported} {metric.description}\n" in text
        if not isinstance(values[name], Histogram):
            assert shown[metric.shown or name] == values[name]
        if name in {each.name for each in fields(found)}:
            assert snapshot(found)[name] == values[name]
    samples = [
        (each.name, each.labels, each.value)
        for family in text_string_to_metric_families(text)
        for each in family.samples
    ]
    for series, label, number in series_of(statistics):
        own = {series.label: label} if series.label else {}
        assert (series.exported, {"endpoint_id": "e", "fleet": "", **own}, number) in samples


@pytest.mark.parametrize("kind", [EnvStatistics, ModelStatistics])
def test_each_count_has_a_metric(kind: type[Statistics]) -> None:
    values = snapshot(EACH[0] if kind is EnvStatistics else EACH[1])

    assert values.keys() - metrics_of(kind).keys() <= NO_METRICS


def know_the_later_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics_report, "EnvStatistics", LaterEnvStatistics)


def test_a_new_metric_reaches_pools_that_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pack_report(later(11))

    assert parse_report(data) == EnvStatistics(
        **{each.name: getattr(later(11), each.name) for each in fields(EnvStatistics)}
    )
    know_the_later_metric(monkeypatch)
    assert parse_report(data) == later(11)


def without(report: pb.Report, *names: str) -> None:
    for name in names:
        report.ClearField(name)


def test_a_report_without_the_newer_fields_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    request = pb.AttendRequest.FromString(pack_report(later(11)))
    without(request.report, "deviations", "transports", "others")
    know_the_later_metric(monkeypatch)

    found = parse_report(request.SerializeToString())

    assert found == replace(later(0), deviations=0, transports={})
    assert status(found)["steps"] == 100


def test_unknown_fields_of_a_report_are_ignored() -> None:
    request = pb.AttendRequest.FromString(pack_report(env_statistics(100, 20.0)))
    request.report.others["steps"] = 5.0  # known, and has a field of its own
    request.report.others["unheard_of"] = 7.0
    unknown_field = bytes([0xF8, 0x3F, 0x01])  # number 1023, a varint
    report = request.report.SerializeToString() + unknown_field
    head = bytes([0x3A]) + varint(len(report))

    assert parse_report(head + report) == env_statistics(100, 20.0)


@pytest.mark.parametrize("number", [-1.0, float("nan"), 2.0**60])
def test_an_impossible_number_of_a_new_metric_is_refused(
    number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = pb.AttendRequest.FromString(pack_report(later(11)))
    request.report.others["thefts"] = number
    know_the_later_metric(monkeypatch)

    with pytest.raises(CodecError, match="out of range"):
        parse_report(request.SerializeToString())


def test_what_an_older_version_has_pickled_has_defaults() -> None:
    older: Any = object.__new__(LaterEnvStatistics)
    values = [getattr(later(3), each.name) for each in fields(LaterEnvStatistics)]
    older.__setstate__(values[:-1])

    found: Mapping[str, Any] = snapshot(older)

    assert found["thefts"] == 0
    assert found["steps"] == 100
