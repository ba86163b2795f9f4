"""What a request has taken is told in parts, which make up the whole."""

import itertools
from types import SimpleNamespace

import pytest

from rlmesh_ray.protocol.messages import EnvTimings
from rlmesh_ray.server import stopwatch
from rlmesh_ray.server.stopwatch import Stopwatch


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    """Return one whose looks at the clock see 1, 2, 4, 8, ..."""
    looks = (2**number for number in itertools.count())
    clock = SimpleNamespace(perf_counter_ns=lambda: next(looks))
    monkeypatch.setattr(stopwatch, "time", clock)
    return Stopwatch()


def test_time_in_the_worker_is_told_apart_from_that_before_and_after(watch: Stopwatch) -> None:
    watch.arrive()  # 1
    watch.begin()  # 2
    watch.ask()  # 4
    watch.hear()  # 8

    told = EnvTimings(16 - 1, queue_ns=1, decode_ns=2, user_ns=4, encode_ns=8)
    assert watch.timings() == told


def test_a_worker_that_is_asked_again_has_all_the_time_between(watch: Stopwatch) -> None:
    watch.arrive()  # 1
    watch.begin()  # 2
    watch.ask()  # 4
    watch.hear()  # 8
    watch.ask()  # not looked at
    watch.hear()  # 16

    told = EnvTimings(32 - 1, queue_ns=1, decode_ns=2, user_ns=12, encode_ns=16)
    assert watch.timings() == told


def test_a_request_that_no_worker_hears_of_has_no_time_there(watch: Stopwatch) -> None:
    watch.arrive()  # 1
    watch.begin()  # 2
    watch.ask()  # 4
    watch.hear()  # 8
    watch.arrive()  # 16
    watch.begin()  # 32

    assert watch.timings() == EnvTimings(64 - 16, queue_ns=16, decode_ns=32)
