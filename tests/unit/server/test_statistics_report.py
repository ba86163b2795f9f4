"""The statistics of endpoints outside of Ray: parsed as they were packed, or refused."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.errors import CodecError
from rlmesh_ray.histogram import DURATION_BOUNDS_NS, NS_PER_S, Histogram
from rlmesh_ray.server.counters import EnvCounters
from rlmesh_ray.server.statistics import EnvStatistics, SessionStatistics
from rlmesh_ray.server.statistics_report import pack_report, parse_report
from rlmesh_ray.wire._pb.rlmesh_ray.registry.v1 import service_pb2 as pb
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
    ],
)
def test_an_impossible_report_is_refused(change: Callable[[pb.Report], object], words: str) -> None:
    with pytest.raises(CodecError, match=words):
        parse_report(wrong(change))


@pytest.mark.parametrize("data", [b"", b"\xff", pb.AttendRequest(pool="p").SerializeToString()])
def test_a_request_without_a_report_is_refused(data: bytes) -> None:
    with pytest.raises(CodecError):
        parse_report(data)
