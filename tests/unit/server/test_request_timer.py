"""What a request has taken is told in parts, which make up the whole."""

import itertools
from types import SimpleNamespace

import pytest

from rlmesh_ray.protocol.messages import EnvTimings
from rlmesh_ray.server import request_timer
from rlmesh_ray.server.request_timer import RequestTimer


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> RequestTimer:
    """Return one whose looks at the clock see 1, 2, 4, 8, ..."""
    looks = (2**number for number in itertools.count())
    clock = SimpleNamespace(perf_counter_ns=lambda: next(looks))
    monkeypatch.setattr(request_timer, "time", clock)
    return RequestTimer()


def test_time_in_the_worker_is_told_apart_from_that_before_and_after(watch: RequestTimer) -> None:
    watch.note_arrival()  # 1
    watch.begin()  # 2
    watch.note_worker_request()  # 4
    watch.note_worker_reply()  # 8

    told = EnvTimings(16 - 1, queue_ns=1, decode_ns=2, user_ns=4, encode_ns=8)
    assert watch.timings() == told


def test_a_worker_that_is_asked_again_has_all_the_time_between(watch: RequestTimer) -> None:
    watch.note_arrival()  # 1
    watch.begin()  # 2
    watch.note_worker_request()  # 4
    watch.note_worker_reply()  # 8
    watch.note_worker_request()  # not looked at
    watch.note_worker_reply()  # 16

    told = EnvTimings(32 - 1, queue_ns=1, decode_ns=2, user_ns=12, encode_ns=16)
    assert watch.timings() == told


def test_a_request_that_no_worker_hears_of_has_no_time_there(watch: RequestTimer) -> None:
    watch.note_arrival()  # 1
    watch.begin()  # 2
    watch.note_worker_request()  # 4
    watch.note_worker_reply()  # 8
    watch.note_arrival()  # 16
    watch.begin()  # 32

    assert watch.timings() == EnvTimings(64 - 16, queue_ns=16, decode_ns=32)
