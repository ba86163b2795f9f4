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


class Signal:
    """A signal and its peer."""

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
def signal() -> Iterator[Signal]:
    signal = Signal()
    yield signal
    signal.close()


def test_a_job_runs_when_its_signal_arrives(
    completions: CompletionQueue[str], signal: Signal
) -> None:
    completions.watch(signal.wakeup, "one", lambda: "done", keep)

    assert completions.take(0.0) is None
    signal.ring()
    assert completions.take(None) == "done"
    assert completions.take(0.0) is None


def test_a_descriptor_whose_number_was_reused_takes_no_job_away(
    completions: CompletionQueue[str], signal: Signal
) -> None:
    completions.watch(signal.wakeup, "one", lambda: "done", keep)
    completions.watch(signal.wakeup, "other", lambda: "done, too", keep)

    signal.ring()

    assert {completions.take(None), completions.take(None)} == {"done", "done, too"}


def test_idle_work_runs_until_a_signal_arrives(
    completions: CompletionQueue[str], signal: Signal
) -> None:
    completions.watch(signal.wakeup, "one", lambda: "done", keep)
    pieces = ["first", "second", "third"]

    def work() -> bool:
        if pieces.pop(0) == "second":
            signal.ring()
        return True

    assert completions.take(None, work) == "done"
    assert pieces == ["third"]


def test_take_waits_when_no_idle_work_is_left(
    completions: CompletionQueue[str], signal: Signal
) -> None:
    completions.watch(signal.wakeup, "one", lambda: "done", keep)
    thread = threading.Thread(target=signal.ring)

    def work() -> bool:
        if not thread.ident:
            thread.start()
        return False

    assert completions.take(None, work) == "done"
    thread.join()


def test_a_job_without_a_signal_for_long_is_handed_back_to_its_owner(
    completions: CompletionQueue[str], signal: Signal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals_module, "_MAX_WATCH_S", 0.0)
    left: list[Job[str]] = []

    def hand_back(job: Job[str]) -> None:
        left.append(job)
        completions.put("it took too long")

    completions.watch(signal.wakeup, "one", lambda: "done", hand_back)

    assert completions.take(None) == "it took too long"
    assert [job() for job in left] == ["done"]
    assert completions.unwatch("one") is None


def test_a_job_without_a_signal_for_long_is_handed_back_although_others_have_signals(
    completions: CompletionQueue[str], signal: Signal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals_module, "_MAX_WATCH_S", 0.0)
    silent = Signal()
    left: list[Job[str]] = []
    completions.watch(silent.wakeup, "silent", lambda: "late", left.append)
    completions.watch(signal.wakeup, "one", lambda: "done", keep)
    signal.ring()

    assert completions.take(None) == "done"
    assert [job() for job in left] == ["late"]
    silent.close()


def test_a_wait_for_signals_ends_when_a_thread_puts_a_result(
    completions: CompletionQueue[str], signal: Signal
) -> None:
    completions.watch(signal.wakeup, "one", lambda: "done", keep)
    thread = threading.Thread(target=completions.put, args=("put",))
    thread.start()

    assert completions.take(None) == "put"
    thread.join()
    assert completions.take(0.0) is None


def test_a_result_that_was_put_before_the_first_watch_is_not_lost(
    completions: CompletionQueue[str], signal: Signal
) -> None:
    completions.put("put")
    completions.watch(signal.wakeup, "one", lambda: "done", keep)
    signal.ring()

    assert [completions.take(None), completions.take(None)] == ["put", "done"]


def test_each_take_runs_one_job(completions: CompletionQueue[str]) -> None:
    several = [Signal() for _ in range(3)]
    for number, signal in enumerate(several):
        completions.watch(signal.wakeup, number, lambda number=number: str(number), keep)  # type: ignore[misc]
        signal.ring()

    assert sorted(str(completions.take(None)) for _ in several) == ["0", "1", "2"]
    for signal in several:
        signal.close()


def test_a_peer_signals_by_its_end_and_not_by_its_data(
    completions: CompletionQueue[str], signal: Signal
) -> None:
    completions.watch(signal.wakeup, "one", lambda: "done", keep)
    signal.peer.sendall(b"said, and not rung")

    assert completions.take(0.0) is None
    signal.peer.close()
    assert completions.take(None) == "done"


def test_a_job_that_is_no_longer_watched_belongs_to_the_caller(
    completions: CompletionQueue[str], signal: Signal
) -> None:
    completions.watch(signal.wakeup, "one", lambda: "done", keep)
    signal.ring()

    job = completions.unwatch("one")
    assert job is not None
    assert job() == "done"
    assert completions.unwatch("one") is None
    assert completions.take(0.0) is None


def test_a_thread_may_be_late(completions: CompletionQueue[str], signal: Signal) -> None:
    completions.watch(signal.wakeup, "one", lambda: "done", keep)
    completions.close()
    completions.close()

    completions.put("put")


def test_signals_found_at_once_need_no_further_wait(
    completions: CompletionQueue[str],
) -> None:
    several = [Signal() for _ in range(3)]
    for number, signal in enumerate(several):
        completions.watch(signal.wakeup, number, lambda number=number: str(number), keep)  # type: ignore[misc]
    several[0].ring()
    several[2].ring()

    assert not completions.is_ready
    assert completions.take(None) == "0"
    assert completions.is_ready
    assert completions.take(None) == "2"
    assert not completions.is_ready
    for signal in several:
        signal.close()


def test_an_unwatched_job_is_not_taken_although_its_signal_has_arrived(
    completions: CompletionQueue[str],
) -> None:
    several = [Signal() for _ in range(2)]
    for number, signal in enumerate(several):
        completions.watch(signal.wakeup, number, lambda number=number: str(number), keep)  # type: ignore[misc]
        signal.ring()
    completions.take(None)

    job = completions.unwatch(1)

    assert job is not None
    assert job() == "1"
    assert not completions.is_ready
    assert completions.take(0.0) is None
    for signal in several:
        signal.close()


def test_a_result_that_was_put_is_ready(completions: CompletionQueue[str]) -> None:
    assert not completions.is_ready
    completions.put("put")
    assert completions.is_ready
