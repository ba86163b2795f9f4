"""Waiting, for descriptors and in general."""

import os

import pytest

from rlmesh_ray import polling
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.polling import AdaptivePoller, AdaptiveSpin


@pytest.fixture(autouse=True)
def as_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spin, regardless of the environment variable."""
    monkeypatch.delenv("RLMESH_RAY_SPIN", raising=False)


def test_the_same_descriptors_are_waited_for_again_and_again() -> None:
    reader, writer = os.pipe()
    poll = AdaptivePoller(1e-3)
    try:
        assert poll.wait_readable(reader, timeout_s=0.0) == []
        os.write(writer, b"x")
        assert poll.wait_readable(reader) == [reader]
        os.read(reader, 1)
        assert poll.wait_readable(reader, timeout_s=0.0) == []
    finally:
        os.close(reader)
        os.close(writer)


def test_a_number_that_is_used_anew_means_the_new_descriptor() -> None:
    poll = AdaptivePoller(1e-3)
    for _ in range(2):
        reader, writer = os.pipe()
        try:
            assert poll.wait_readable(reader, timeout_s=0.0) == []
            os.write(writer, b"x")
            assert poll.wait_readable(reader) == [reader]
        finally:
            os.close(reader)
            os.close(writer)


def test_any_number_of_descriptors_can_be_waited_for_in_turn() -> None:
    poll = AdaptivePoller(1e-3)
    pipes = [os.pipe() for _ in range(100)]
    try:
        for reader, writer in pipes:
            os.write(writer, b"x")
            assert poll.wait_readable(reader) == [reader]
    finally:
        for pipe in pipes:
            for end in pipe:
                os.close(end)


class Clock:
    """Time that passes with each look at it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.each_s = 0.0

    def perf_counter(self) -> float:
        self.now_s += self.each_s
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(polling, "time", clock)
    return clock


def wait(looking: AdaptiveSpin, clock: Clock, seconds: float) -> None:
    """Wait for something that comes after so long, looked for or not."""
    clock.each_s = 0.0
    looking.spin(lambda: True)
    clock.now_s += seconds
    looking.learn()


def num_looks(
    looking: AdaptiveSpin, clock: Clock, most_s: float | None = None, each_s: float = 1e-4
) -> int:
    """Return how often is looked for what does not come, if each look takes ``each_s``."""
    clock.each_s = each_s
    looks = 0

    def spin() -> bool:
        nonlocal looks
        looks += 1
        return False

    looking.spin(spin, most_s)
    return looks


def test_who_has_waited_for_a_short_time_looks_for_about_as_long(clock: Clock) -> None:
    looking = AdaptiveSpin(1.5e-3)
    assert num_looks(looking, clock) == 1

    for _ in range(20):
        wait(looking, clock, 0.5e-3)

    assert 8 <= num_looks(looking, clock) <= 10
    assert num_looks(looking, clock, 0.25e-3) == 3
    assert num_looks(looking, clock, 0.0) == 1


def test_a_single_long_wait_changes_little_and_many_end_the_looking(clock: Clock) -> None:
    looking = AdaptiveSpin(1.5e-3)
    for _ in range(20):
        wait(looking, clock, 0.4e-3)

    wait(looking, clock, 60.0)
    assert num_looks(looking, clock) > 10

    for _ in range(20):
        wait(looking, clock, 2e-3)
    assert num_looks(looking, clock) == 1


def shares(looking: AdaptiveSpin, clock: Clock, looking_s: float, sleeping_s: float) -> list[float]:
    """Return what part of each thousand waits looks, if waits take so long."""
    parts = []
    for _ in range(8):
        num_looked = 0
        for _ in range(1000):
            looks = looking.spin_s > 0.0
            num_looked += looks
            wait(looking, clock, looking_s if looks else sleeping_s)
        parts.append(num_looked / 1000)
    return parts


def test_waits_look_where_that_makes_them_shorter_and_else_sleep(clock: Clock) -> None:
    looking = AdaptiveSpin(1.5e-3)

    gains = shares(looking, clock, 0.3e-3, 0.5e-3)
    assert gains[-1] > 0.97
    losses = shares(looking, clock, 0.5e-3, 0.3e-3)
    assert losses[-1] < 0.03
    again = shares(looking, clock, 0.3e-3, 0.5e-3)
    assert again[-1] > 0.97


def test_a_gain_that_is_not_worth_a_processor_is_let_go(clock: Clock) -> None:
    assert shares(AdaptiveSpin(1.5e-3), clock, 0.49e-3, 0.5e-3)[-1] < 0.03


def test_what_is_there_is_returned_at_once(clock: Clock) -> None:
    looking = AdaptiveSpin(1e-3)
    looks = iter([[], [], ["it"], ["more"]])
    for _ in range(20):
        wait(looking, clock, 0.5e-3)

    assert looking.spin(lambda: next(looks)) == ["it"]


def test_idle_work_is_done_between_two_polls(clock: Clock) -> None:
    looking = AdaptiveSpin(1e-3)
    looks, pieces = iter([[], [], ["it"]]), [True, True, True]

    assert looking.spin(lambda: next(looks), meanwhile=pieces.pop) == ["it"]
    assert pieces == [True]


def test_when_nothing_is_left_to_do_the_looking_ends_as_without(clock: Clock) -> None:
    looking = AdaptiveSpin(1e-3)
    looks, pieces = iter([[], [], ["it"]]), [False, True]

    assert looking.spin(lambda: next(looks), meanwhile=pieces.pop) == []


@pytest.mark.parametrize(
    ("variable", "looks"), [("0", False), ("1", True), ("", True), (None, True)]
)
def test_without_spin_every_wait_sleeps_at_once(
    variable: str | None, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(polling, "time", clock)
    if variable is None:
        monkeypatch.delenv("RLMESH_RAY_SPIN", raising=False)
    else:
        monkeypatch.setenv("RLMESH_RAY_SPIN", variable)
    looking = AdaptiveSpin(1e-3)

    for _ in range(20):  # short waits, after which others would look for a while
        looking.begin()
        looking.learn()

    assert (looking.spin_s > 0.0) == looks


@pytest.mark.parametrize("spin", [False, True])
def test_a_wait_for_descriptors_looks_only_with_spin(
    clock: Clock, spin: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLMESH_RAY_SPIN", str(int(spin)))
    poll = AdaptivePoller(1e-3)
    reader, writer = os.pipe()
    os.write(writer, b"x")

    for _ in range(20):
        poll.wait_readable(reader)
    os.read(reader, 1)
    clock.each_s = 1e-5
    num_looks = 0

    def note() -> bool:
        nonlocal num_looks
        num_looks += 1
        return False

    assert poll.wait_readable(reader, timeout_s=1e-3, meanwhile=note) == []

    os.close(reader)
    os.close(writer)
    assert (num_looks > 1) == spin


def test_a_spin_pauses_between_two_polls() -> None:
    done: list[str] = []
    looking = AdaptiveSpin(1e-3, pause=lambda: done.append("pause"))

    def poll() -> bool:
        done.append("poll")
        return len(done) > 4

    looking.spin(poll, meanwhile=lambda: True)

    assert done == ["poll", "pause", "poll", "pause", "poll"]


def test_a_setting_of_spin_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLMESH_RAY_SPIN", "off")

    with pytest.raises(ConfigurationError, match="RLMESH_RAY_SPIN='off': 0 makes every wait sleep"):
        AdaptiveSpin(1e-3)
