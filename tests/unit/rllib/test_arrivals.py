import os
import socket
import threading
from collections.abc import Iterator

import pytest

from rlmesh_ray.rllib import arrivals as arrivals_module
from rlmesh_ray.rllib.arrivals import Arrivals, Job
from rlmesh_ray.waiting import Signal


@pytest.fixture
def arrivals() -> Iterator[Arrivals[str]]:
    arrivals: Arrivals[str] = Arrivals(2)
    yield arrivals
    arrivals.close()


def keep(job: object) -> None:
    raise AssertionError("it did not take long")


class Told:
    """A signal, and what makes it tell."""

    def __init__(self) -> None:
        self._eventfd = os.eventfd(0)
        self._ours, self.peer = socket.socketpair()
        self.signal = Signal(self._eventfd, self._ours.fileno())

    def ring(self) -> None:
        os.eventfd_write(self._eventfd, 1)

    def close(self) -> None:
        os.close(self._eventfd)
        self._ours.close()
        self.peer.close()


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    yield told
    told.close()


def test_work_is_done_when_its_signal_tells(arrivals: Arrivals[str], told: Told) -> None:
    arrivals.watch(told.signal, "one", lambda: "done", keep)

    assert arrivals.take(0.0) is None
    told.ring()
    assert arrivals.take(None) == "done"
    assert arrivals.take(0.0) is None


def test_a_descriptor_that_is_another_one_by_now_takes_no_work_away(
    arrivals: Arrivals[str], told: Told
) -> None:
    arrivals.watch(told.signal, "one", lambda: "done", keep)
    arrivals.watch(told.signal, "other", lambda: "done, too", keep)

    told.ring()

    assert {arrivals.take(None), arrivals.take(None)} == {"done", "done, too"}


def test_there_is_something_to_do_until_a_signal_tells(arrivals: Arrivals[str], told: Told) -> None:
    arrivals.watch(told.signal, "one", lambda: "done", keep)
    pieces = ["first", "second", "third"]

    def work() -> bool:
        if pieces.pop(0) == "second":
            told.ring()
        return True

    assert arrivals.take(None, work) == "done"
    assert pieces == ["third"]


def test_who_has_nothing_left_to_do_waits(arrivals: Arrivals[str], told: Told) -> None:
    arrivals.watch(told.signal, "one", lambda: "done", keep)
    thread = threading.Thread(target=told.ring)

    def work() -> bool:
        if not thread.ident:
            thread.start()
        return False

    assert arrivals.take(None, work) == "done"
    thread.join()


def test_what_does_not_tell_for_long_is_left_to_its_owner_who_knows_for_how_long_to_wait(
    arrivals: Arrivals[str], told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals_module, "_LONG_S", 0.0)
    left: list[Job[str]] = []

    def leave(job: Job[str]) -> None:
        left.append(job)
        arrivals.put("it took too long")

    arrivals.watch(told.signal, "one", lambda: "done", leave)

    assert arrivals.take(None) == "it took too long"
    assert [job() for job in left] == ["done"]
    assert arrivals.unwatch("one") is None


def test_what_does_not_tell_for_long_is_left_although_others_tell(
    arrivals: Arrivals[str], told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals_module, "_LONG_S", 0.0)
    silent = Told()
    left: list[Job[str]] = []
    arrivals.watch(silent.signal, "silent", lambda: "late", left.append)
    arrivals.watch(told.signal, "one", lambda: "done", keep)
    told.ring()

    assert arrivals.take(None) == "done"
    assert [job() for job in left] == ["late"]
    silent.close()


def test_who_waits_for_signals_hears_of_threads(arrivals: Arrivals[str], told: Told) -> None:
    arrivals.watch(told.signal, "one", lambda: "done", keep)
    thread = threading.Thread(target=arrivals.put, args=("put",))
    thread.start()

    assert arrivals.take(None) == "put"
    thread.join()
    assert arrivals.take(0.0) is None


def test_what_was_put_before_anything_was_watched_is_not_forgotten(
    arrivals: Arrivals[str], told: Told
) -> None:
    arrivals.put("put")
    arrivals.watch(told.signal, "one", lambda: "done", keep)
    told.ring()

    assert [arrivals.take(None), arrivals.take(None)] == ["put", "done"]


def test_each_take_does_one_work(arrivals: Arrivals[str]) -> None:
    several = [Told() for _ in range(3)]
    for number, told in enumerate(several):
        arrivals.watch(told.signal, number, lambda number=number: str(number), keep)  # type: ignore[misc]
        told.ring()

    assert sorted(str(arrivals.take(None)) for _ in several) == ["0", "1", "2"]
    for told in several:
        told.close()


def test_who_waits_for_a_peer_hears_of_its_end_and_of_nothing_that_it_says(
    arrivals: Arrivals[str], told: Told
) -> None:
    arrivals.watch(told.signal, "one", lambda: "done", keep)
    told.peer.sendall(b"said, and not rung")

    assert arrivals.take(0.0) is None
    told.peer.close()
    assert arrivals.take(None) == "done"


def test_what_is_no_longer_watched_is_the_caller_s(arrivals: Arrivals[str], told: Told) -> None:
    arrivals.watch(told.signal, "one", lambda: "done", keep)
    told.ring()

    job = arrivals.unwatch("one")
    assert job is not None
    assert job() == "done"
    assert arrivals.unwatch("one") is None
    assert arrivals.take(0.0) is None


def test_a_thread_may_be_late(arrivals: Arrivals[str], told: Told) -> None:
    arrivals.watch(told.signal, "one", lambda: "done", keep)
    arrivals.close()
    arrivals.close()

    arrivals.put("put")


def test_what_one_look_has_found_is_there_without_another(arrivals: Arrivals[str]) -> None:
    several = [Told() for _ in range(3)]
    for number, told in enumerate(several):
        arrivals.watch(told.signal, number, lambda number=number: str(number), keep)  # type: ignore[misc]
    several[0].ring()
    several[2].ring()

    assert not arrivals.is_there
    assert arrivals.take(None) == "0"
    assert arrivals.is_there
    assert arrivals.take(None) == "2"
    assert not arrivals.is_there
    for told in several:
        told.close()


def test_what_is_watched_no_more_is_not_taken_although_it_has_told(
    arrivals: Arrivals[str],
) -> None:
    several = [Told() for _ in range(2)]
    for number, told in enumerate(several):
        arrivals.watch(told.signal, number, lambda number=number: str(number), keep)  # type: ignore[misc]
        told.ring()
    arrivals.take(None)

    job = arrivals.unwatch(1)

    assert job is not None
    assert job() == "1"
    assert not arrivals.is_there
    assert arrivals.take(0.0) is None
    for told in several:
        told.close()


def test_what_was_put_is_there(arrivals: Arrivals[str]) -> None:
    assert not arrivals.is_there
    arrivals.put("put")
    assert arrivals.is_there
