import dataclasses
from typing import Any

import pytest

from rlmesh_ray.errors import CodecError
from rlmesh_ray.wire import observe_v1 as wire
from rlmesh_ray.wire._pb.rlmesh_ray.observe.v1 import service_pb2 as pb
from rlmesh_ray.wire.observe_v1 import EndpointStatistics, ObservedSession

SESSION = ObservedSession(
    *("ab12", "ipv4:192.0.2.7:1", 2**62, "rlmesh.protocol.v1", "shared memory"),
    *(("e1", ""), (3, 2**40), (0.5, -1e300)),
    *(5, 10, 2, 1, 4),
)


def test_sessions_arrive_as_they_are() -> None:
    sessions = (SESSION, dataclasses.replace(SESSION, name="cd34", peer=""))

    assert wire.parse_sessions(wire.pack_sessions(sessions)) == sessions


def test_statistics_arrive_as_they_are() -> None:
    statistics = (
        EndpointStatistics("env", {"steps": 3, "errors": {"TIMEOUT": 1}}),
        EndpointStatistics("", {}, "sim-1", "192.0.2.1:5555", 2),
    )

    assert wire.parse_statistics(wire.pack_statistics(statistics)) == statistics


@pytest.mark.parametrize("counters", ["", "3", "{", "[" * 100_000])
def test_counters_that_are_no_object_are_refused(counters: str) -> None:
    message = pb.StatisticsResponse(endpoints=[pb.EndpointStatistics(counters=counters)])

    with pytest.raises(CodecError, match="JSON"):
        wire.parse_statistics(message.SerializeToString())


def test_what_is_asked_for_arrives() -> None:
    assert wire.parse_render_request(wire.pack_render_request("ab12", 7)) == ("ab12", 7)
    assert wire.parse_png(wire.pack_png(b"png")) == b"png"


@pytest.mark.parametrize("lane", [-1, 2**32, "0"])
def test_what_is_no_lane_is_not_sent(lane: Any) -> None:
    with pytest.raises(CodecError, match="no session has a lane"):
        wire.pack_render_request("ab12", lane)


def test_lanes_that_contradict_each_other_are_refused() -> None:
    message = pb.ListResponse.FromString(wire.pack_sessions([SESSION]))
    message.sessions[0].step_counts.append(1)

    with pytest.raises(CodecError, match="has several numbers of lanes"):
        wire.parse_sessions(message.SerializeToString())


@pytest.mark.parametrize(
    "parse",
    [wire.parse_sessions, wire.parse_render_request, wire.parse_png, wire.parse_statistics],
)
def test_what_is_no_frame_is_refused(parse: Any) -> None:
    with pytest.raises(CodecError):
        parse(b"\xff")
