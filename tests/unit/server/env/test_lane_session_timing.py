"""The times of a request come in parts, which add up to the total."""

import itertools
from types import SimpleNamespace

import pytest

from rlmesh_ray.protocol.messages import EnvTimings
from rlmesh_ray.server.env import lane_session
from rlmesh_ray.server.env.lane_session import RequestTimer


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> RequestTimer:
    """Return one whose clock reads 1, 2, 4, 8, ..."""
    readings = (2**number for number in itertools.count())
    clock = SimpleNamespace(perf_counter_ns=lambda: next(readings))
    monkeypatch.setattr(lane_session, "time", clock)
    return RequestTimer()


def test_time_in_the_worker_is_separate_from_that_before_and_after(timer: RequestTimer) -> None:
    timer.note_arrival()  # 1
    timer.begin()  # 2
    with timer:  # 4
        pass  # 8

    expected = EnvTimings(16 - 1, queue_ns=1, decode_ns=2, user_ns=4, encode_ns=8)
    assert timer.timings() == expected


def test_a_worker_that_is_asked_again_has_all_the_time_between(timer: RequestTimer) -> None:
    timer.note_arrival()  # 1
    timer.begin()  # 2
    with timer:  # 4
        pass  # 8
    with timer:  # does not read the clock
        pass  # 16

    expected = EnvTimings(32 - 1, queue_ns=1, decode_ns=2, user_ns=12, encode_ns=16)
    assert timer.timings() == expected


def test_a_request_without_a_worker_has_no_time_there(timer: RequestTimer) -> None:
    timer.note_arrival()  # 1
    timer.begin()  # 2
    with timer:  # 4
        pass  # 8
    timer.note_arrival()  # 16
    timer.begin()  # 32

    assert timer.timings() == EnvTimings(64 - 16, queue_ns=16, decode_ns=32)
