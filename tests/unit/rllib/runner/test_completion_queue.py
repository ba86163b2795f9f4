import os
import socket
import threading
from collections.abc import Iterator

import pytest

from rlmesh_ray.polling import WakeupDescriptors
from rlmesh_ray.rllib.runner import completion_queue as arrivals_module
from rlmesh_ray.rllib.runner.completion_queue import CompletionQueue, Job


@pytest.fixture
def completions() -> Iterator[CompletionQueue[str]]:
    completions: CompletionQueue[str] = CompletionQueue(2)
    yield completions
    completions.close()


def keep(job: object) -> None:
    raise AssertionError("it did not take long")


class Told:
    """A signal, and what makes it tell."""

    def __init__(self) -> None:
        self._eventfd = os.eventfd(0)
        self._ours, self.peer = socket.socketpair()
        self.wakeup = WakeupDescriptors(self._eventfd, self._ours.fileno())

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


def test_work_is_done_when_its_signal_tells(completions: CompletionQueue[str], told: Told) -> None:
    completions.watch(told.wakeup, "one", lambda: "done", keep)

    assert completions.take(0.0) is None
    told.ring()
    assert completions.take(None) == "done"
    assert completions.take(0.0) is None


def test_a_descriptor_that_is_another_one_by_now_takes_no_work_away(
    completions: CompletionQueue[str], told: Told
) -> None:
    completions.watch(told.wakeup, "one", lambda: "done", keep)
    completions.watch(told.wakeup, "other", lambda: "done, too", keep)

    told.ring()

    assert {completions.take(None), completions.take(None)} == {"done", "done, too"}


def test_there_is_something_to_do_until_a_signal_tells(
    completions: CompletionQueue[str], told: Told
) -> None:
    completions.watch(told.wakeup, "one", lambda: "done", keep)
    pieces = ["first", "second", "third"]

    def work() -> bool:
        if pieces.pop(0) == "second":
            told.ring()
        return True

    assert completions.take(None, work) == "done"
    assert pieces == ["third"]


def test_who_has_nothing_left_to_do_waits(completions: CompletionQueue[str], told: Told) -> None:
    completions.watch(told.wakeup, "one", lambda: "done", keep)
    thread = threading.Thread(target=told.ring)

    def work() -> bool:
        if not thread.ident:
            thread.start()
        return False

    assert completions.take(None, work) == "done"
    thread.join()


def test_what_does_not_tell_for_long_is_left_to_its_owner_who_knows_for_how_long_to_wait(
    completions: CompletionQueue[str], told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals_module, "_MAX_WATCH_S", 0.0)
    left: list[Job[str]] = []

    def hand_back(job: Job[str]) -> None:
        left.append(job)
        completions.put("it took too long")

    completions.watch(told.wakeup, "one", lambda: "done", hand_back)

    assert completions.take(None) == "it took too long"
    assert [job() for job in left] == ["done"]
    assert completions.unwatch("one") is None


def test_what_does_not_tell_for_long_is_left_although_others_tell(
    completions: CompletionQueue[str], told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals_module, "_MAX_WATCH_S", 0.0)
    silent = Told()
    left: list[Job[str]] = []
    completions.watch(silent.wakeup, "silent", lambda: "late", left.append)
    completions.watch(told.wakeup, "one", lambda: "done", keep)
    told.ring()

    assert completions.take(None) == "done"
    assert [job() for job in left] == ["late"]
    silent.close()


def test_who_waits_for_signals_hears_of_threads(
    completions: CompletionQueue[str], told: Told
) -> None:
    completions.watch(told.wakeup, "one", lambda: "done", keep)
    thread = threading.Thread(target=completions.put, args=("put",))
    thread.start()

    assert completions.take(None) == "put"
    thread.join()
    assert completions.take(0.0) is None


def test_what_was_put_before_anything_was_watched_is_not_forgotten(
    completions: CompletionQueue[str], told: Told
) -> None:
    completions.put("put")
    completions.watch(told.wakeup, "one", lambda: "done", keep)
    told.ring()

    assert [completions.take(None), completions.take(None)] == ["put", "done"]


def test_each_take_does_one_work(completions: CompletionQueue[str]) -> None:
    several = [Told() for _ in range(3)]
    for number, told in enumerate(several):
        completions.watch(told.wakeup, number, lambda number=number: str(number), keep)  # type: ignore[misc]
        told.ring()

    assert sorted(str(completions.take(None)) for _ in several) == ["0", "1", "2"]
    for told in several:
        told.close()


def test_who_waits_for_a_peer_hears_of_its_end_and_of_nothing_that_it_says(
    completions: CompletionQueue[str], told: Told
) -> None:
    completions.watch(told.wakeup, "one", lambda: "done", keep)
    told.peer.sendall(b"said, and not rung")

    assert completions.take(0.0) is None
    told.peer.close()
    assert completions.take(None) == "done"


def test_what_is_no_longer_watched_is_the_caller_s(
    completions: CompletionQueue[str], told: Told
) -> None:
    completions.watch(told.wakeup, "one", lambda: "done", keep)
    told.ring()

    job = completions.unwatch("one")
    assert job is not None
    assert job() == "done"
    assert completions.unwatch("one") is None
    assert completions.take(0.0) is None


def test_a_thread_may_be_late(completions: CompletionQueue[str], told: Told) -> None:
    completions.watch(told.wakeup, "one", lambda: "done", keep)
    completions.close()
    completions.close()

    completions.put("put")


def test_what_one_look_has_found_is_there_without_another(
    completions: CompletionQueue[str],
) -> None:
    several = [Told() for _ in range(3)]
    for number, told in enumerate(several):
        completions.watch(told.wakeup, number, lambda number=number: str(number), keep)  # type: ignore[misc]
    several[0].ring()
    several[2].ring()

    assert not completions.is_ready
    assert completions.take(None) == "0"
    assert completions.is_ready
    assert completions.take(None) == "2"
    assert not completions.is_ready
    for told in several:
        told.close()


def test_what_is_watched_no_more_is_not_taken_although_it_has_told(
    completions: CompletionQueue[str],
) -> None:
    several = [Told() for _ in range(2)]
    for number, told in enumerate(several):
        completions.watch(told.wakeup, number, lambda number=number: str(number), keep)  # type: ignore[misc]
        told.ring()
    completions.take(None)

    job = completions.unwatch(1)

    assert job is not None
    assert job() == "1"
    assert not completions.is_ready
    assert completions.take(0.0) is None
    for told in several:
        told.close()


def test_what_was_put_is_there(completions: CompletionQueue[str]) -> None:
    assert not completions.is_ready
    completions.put("put")
    assert completions.is_ready
