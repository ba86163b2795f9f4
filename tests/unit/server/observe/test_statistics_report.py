"""The statistics of endpoints outside of Ray: parsed as they were packed, or refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.watching.samples import model_statistics
from rlmesh_ray.errors import CodecError
from rlmesh_ray.histogram import DURATION_BOUNDS_NS, NS_PER_S, Histogram
from rlmesh_ray.server.observe.counters import EnvCounters
from rlmesh_ray.server.observe.statistics import EnvStatistics, ModelStatistics, SessionStatistics
from rlmesh_ray.server.observe.statistics_report import (
    observed_statistics,
    pack_report,
    parse_report,
    statistics_of,
)
from rlmesh_ray.wire._pb.rlmesh_ray.registry.v1 import service_pb2 as pb
from rlmesh_ray.wire.observe_v1 import EndpointStatistics, pack_statistics, parse_statistics
from rlmesh_ray.wire.registry_v1 import MAX_REQUEST_BYTES
from tests.lane_counts import note_step

COUNT = st.integers(0, 2**53 - 1)
SECONDS = st.floats(0.0, 1e9)
NUM_PARTS = len(DURATION_BOUNDS_NS) + 1
STATISTICS = st.builds(
    EnvStatistics,
    version=st.text("0123456789.abc", max_size=20),
    uptime_s=SECONDS,
    sessions=st.builds(SessionStatistics, COUNT, COUNT, COUNT, COUNT),
    steps=COUNT,
    lane_steps=COUNT,
    resets=COUNT,
    episodes=COUNT,
    errors=st.dictionaries(st.sampled_from(["TIMEOUT", "BAD_ACTION"]), COUNT),
    worker_restarts=COUNT,
    deviations=COUNT,
    transports=st.dictionaries(st.sampled_from(["shared_memory", "tcp", "grpc"]), COUNT),
    step_s=st.builds(
        Histogram,
        st.just(tuple(bound / NS_PER_S for bound in DURATION_BOUNDS_NS)),
        st.lists(COUNT, min_size=NUM_PARTS, max_size=NUM_PARTS).map(tuple),
        SECONDS,
    ),
)


@given(STATISTICS)
def test_statistics_are_parsed_as_they_were_packed(statistics: EnvStatistics) -> None:
    assert parse_report(pack_report(statistics)) == statistics


def test_what_an_endpoint_counts_fits_a_request() -> None:
    counts = EnvCounters()
    note_step(counts.open(), 30_000, 4, 1)

    report = pack_report(counts.statistics())

    assert len(report) < MAX_REQUEST_BYTES / 4
    parsed = parse_report(report)
    assert (parsed.steps, parsed.lane_steps, parsed.episodes) == (1, 4, 1)
    assert parsed.transports == {"grpc": 1}
    assert parsed.step_s.count == 1


def wrong(change: Callable[[pb.Report], object]) -> bytes:
    request = pb.AttendRequest.FromString(pack_report(EnvCounters().statistics()))
    change(request.report)
    return request.SerializeToString()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda report: setattr(report, "uptime_s", float("nan")), "out of range"),
        (lambda report: setattr(report, "uptime_s", float("inf")), "out of range"),
        (lambda report: setattr(report, "step_seconds", -1.0), "out of range"),
        (lambda report: setattr(report, "steps", 2**64 - 1), "out of range"),
        (lambda report: report.errors.update({"TIMEOUT": 2**60}), "out of range"),
        (lambda report: report.steps_by_duration.append(1), "20 parts"),
        (lambda report: report.ClearField("steps_by_duration"), "20 parts"),
        (lambda report: report.errors.update({"a\nb": 1}), "invalid names"),
        (lambda report: report.errors.update({"": 1}), "invalid names"),
        (lambda report: report.errors.update({"A" * 65: 1}), "invalid names"),
        (lambda report: report.errors.update({f"E{n}": 1 for n in range(65)}), "too many"),
        (lambda report: report.transports.update({"a b": 1}), "invalid names"),
    ],
)
def test_an_impossible_report_is_refused(change: Callable[[pb.Report], object], words: str) -> None:
    with pytest.raises(CodecError, match=words):
        parse_report(wrong(change))


@pytest.mark.parametrize("data", [b"", b"\xff", pb.AttendRequest(pool="p").SerializeToString()])
def test_a_request_without_a_report_is_refused(data: bytes) -> None:
    with pytest.raises(CodecError):
        parse_report(data)


@given(STATISTICS)
def test_observers_receive_statistics_as_they_are(statistics: EnvStatistics) -> None:
    (observed,) = parse_statistics(pack_statistics([observed_statistics(statistics)]))

    assert statistics_of(observed) == statistics


def test_observers_receive_those_of_a_policy_too() -> None:
    statistics = model_statistics(5, 60.0)

    (observed,) = parse_statistics(pack_statistics([observed_statistics(statistics)]))

    assert observed.service == "model"
    assert statistics_of(observed) == statistics


def test_an_older_endpoint_does_not_say_how_its_policy_runs() -> None:
    statistics = model_statistics(5, 60.0)
    observed = observed_statistics(statistics)

    older = {
        name: value
        for name, value in observed.counters.items()
        if name not in {"inference", "torch_reason"}
    }

    assert statistics_of(replace(observed, counters=older)) == replace(
        statistics, inference="", torch_reason=""
    )


def test_a_reason_of_any_length_and_wording_is_taken_and_cut() -> None:
    reason = '"}\n{' * 1000
    statistics = replace(model_statistics(5, 60.0), torch_reason=reason)

    (observed,) = parse_statistics(pack_statistics([observed_statistics(statistics)]))

    found = statistics_of(observed)
    assert isinstance(found, ModelStatistics)
    assert found.torch_reason == reason[:400]


def test_an_endpoint_that_has_not_reported_has_no_statistics() -> None:
    assert statistics_of(EndpointStatistics("", {})) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": "many"},
        {"steps": -1},
        {"steps": 2**60},
        {"uptime_s": float("nan")},
        {"uptime_s": None},
        {"errors": {"TIMEOUT": "often"}},
        {"errors": 3},
        {"sessions": 3},
        {"sessions": {"open": -1}},
        {"step_s": {"bounds": [1.0], "counts": [0], "total": 0}},
        {"step_s": {"bounds": [], "counts": None, "total": 0}},
    ],
)
def test_statistics_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    observed = observed_statistics(EnvCounters().statistics())

    with pytest.raises(CodecError, match="not understood"):
        statistics_of(replace(observed, counters={**observed.counters, **changes}))
    with pytest.raises(CodecError, match=r"'uptime_s'.*install versions that match"):
        statistics_of(replace(observed, counters={"version": "9"}))


def test_counters_of_a_later_version_are_ignored() -> None:
    observed = observed_statistics(EnvCounters().statistics())

    later = replace(observed, counters={**observed.counters, "later": 1})

    assert statistics_of(later) == statistics_of(observed)
