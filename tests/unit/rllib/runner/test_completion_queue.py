import os
import socket
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from rlmesh_ray.polling import WakeupDescriptors
from rlmesh_ray.rllib.runner import completion_queue as arrivals_module
from rlmesh_ray.rllib.runner.completion_queue import CompletionQueue


@pytest.fixture
def completions() -> Iterator[CompletionQueue[str]]:
    completions: CompletionQueue[str] = CompletionQueue(2)
    yield completions
    completions.close()


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
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs without a signal are late from the beginning."""
    monkeypatch.setattr(arrivals_module, "_MAX_WATCH_S", 0.0)


@pytest.fixture
def signal() -> Iterator[Signal]:
    signal = Signal()
    yield signal
    signal.close()


def test_a_job_runs_when_its_signal_arrives(
    completions: CompletionQueue[str], signal: Signal
) -> None:
    completions.submit("one", lambda: "done", signal.wakeup)

    assert completions.take(0.0) is None
    signal.ring()
    assert completions.take(None) == "done"
    assert completions.take(0.0) is None


def test_a_descriptor_whose_number_was_reused_takes_no_job_away(
    completions: CompletionQueue[str], signal: Signal
) -> None:
    completions.submit("one", lambda: "done", signal.wakeup)
    completions.submit("other", lambda: "done, too", signal.wakeup)

    signal.ring()

    assert {completions.take(None), completions.take(None)} == {"done", "done, too"}


def test_idle_work_runs_until_a_signal_arrives(
    completions: CompletionQueue[str], signal: Signal
) -> None:
    completions.submit("one", lambda: "done", signal.wakeup)
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
    completions.submit("one", lambda: "done", signal.wakeup)
    thread = threading.Thread(target=signal.ring)

    def work() -> bool:
        if not thread.ident:
            thread.start()
        return False

    assert completions.take(None, work) == "done"
    thread.join()


@pytest.mark.usefixtures("no_patience")
def test_a_job_without_a_signal_for_long_runs_in_a_thread(
    completions: CompletionQueue[str], signal: Signal
) -> None:
    names: list[str] = []

    def job() -> str:
        names.append(threading.current_thread().name)
        return "late"

    completions.submit("one", job, signal.wakeup)

    assert completions.take(None) == "late"
    assert names == ["rlmesh-ray-slot"]


@pytest.mark.usefixtures("no_patience")
def test_a_job_without_a_signal_for_long_runs_although_others_have_signals(
    completions: CompletionQueue[str], signal: Signal
) -> None:
    silent = Signal()
    completions.submit("silent", lambda: "late", silent.wakeup)
    completions.submit("one", lambda: "done", signal.wakeup)
    signal.ring()

    assert {completions.take(None), completions.take(None)} == {"done", "late"}
    silent.close()


@pytest.mark.usefixtures("no_patience")
def test_the_next_job_of_an_owner_runs_after_its_late_one(signal: Signal) -> None:
    completions, may_end = CompletionQueue[str](1), threading.Event()

    def late() -> str:
        may_end.wait(10)
        return "late"

    completions.submit("one", late, signal.wakeup)
    assert completions.take(0.0) is None
    completions.submit("one", lambda: "next")
    may_end.set()

    assert [completions.take(10), completions.take(10)] == ["late", "next"]
    completions.close()


def test_a_wait_for_signals_ends_when_a_thread_puts_a_result(
    completions: CompletionQueue[str], signal: Signal
) -> None:
    completions.submit("one", lambda: "done", signal.wakeup)
    completions.submit("other", lambda: "put")

    assert completions.take(None) == "put"
    assert completions.take(0.0) is None


def test_a_result_that_was_put_before_the_first_watch_is_not_lost(
    completions: CompletionQueue[str], signal: Signal
) -> None:
    completions.submit("other", lambda: "put")
    completions.submit("one", lambda: "done", signal.wakeup)
    signal.ring()

    assert {completions.take(None), completions.take(None)} == {"put", "done"}


def test_each_take_runs_one_job(completions: CompletionQueue[str]) -> None:
    several = [Signal() for _ in range(3)]
    for number, signal in enumerate(several):
        completions.submit(number, lambda number=number: str(number), signal.wakeup)  # type: ignore[misc]
        signal.ring()

    assert sorted(str(completions.take(None)) for _ in several) == ["0", "1", "2"]
    for signal in several:
        signal.close()


def test_a_peer_signals_by_its_end_and_not_by_its_data(
    completions: CompletionQueue[str], signal: Signal
) -> None:
    completions.submit("one", lambda: "done", signal.wakeup)
    signal.peer.sendall(b"said, and not rung")

    assert completions.take(0.0) is None
    signal.peer.close()
    assert completions.take(None) == "done"


def test_a_job_that_is_no_longer_watched_runs_in_the_next_take(
    completions: CompletionQueue[str], signal: Signal
) -> None:
    completions.submit("one", lambda: "done", signal.wakeup)
    signal.ring()

    completions.stop_watching("one")
    completions.stop_watching("one")

    assert completions.take(0.0) == "done"
    assert completions.take(0.0) is None


def test_a_watched_job_runs_before_the_one_that_supersedes_it(signal: Signal) -> None:
    completions, names = CompletionQueue[str](1), list[str]()

    def job(name: str) -> str:
        names.append(name)
        return name

    completions.submit("one", partial(job, "step"), signal.wakeup)
    completions.submit("one", partial(job, "reset"))

    assert completions.take(0.0) == "reset"
    assert names == ["step", "reset"]
    assert not completions.is_ready
    completions.close()


def test_a_thread_may_be_late(completions: CompletionQueue[str], signal: Signal) -> None:
    may_end = threading.Event()
    completions.submit("one", lambda: "done", signal.wakeup)
    completions.submit("other", lambda: str(may_end.wait(10)))
    completions.close()
    completions.close()

    may_end.set()

    assert completions.take(10) == "True"


def test_signals_found_at_once_need_no_further_wait(
    completions: CompletionQueue[str],
) -> None:
    several = [Signal() for _ in range(3)]
    for number, signal in enumerate(several):
        completions.submit(number, lambda number=number: str(number), signal.wakeup)  # type: ignore[misc]
    several[0].ring()
    several[2].ring()

    assert not completions.is_ready
    assert completions.take(None) == "0"
    assert completions.is_ready
    assert completions.take(None) == "2"
    assert not completions.is_ready
    for signal in several:
        signal.close()


def test_an_unwatched_job_is_taken_once_although_its_signal_has_arrived(
    completions: CompletionQueue[str],
) -> None:
    several = [Signal() for _ in range(2)]
    for number, signal in enumerate(several):
        completions.submit(number, lambda number=number: str(number), signal.wakeup)  # type: ignore[misc]
        signal.ring()
    completions.take(None)

    completions.stop_watching(1)

    assert completions.is_ready
    assert completions.take(0.0) == "1"
    assert not completions.is_ready
    assert completions.take(0.0) is None
    for signal in several:
        signal.close()


def test_a_result_that_was_put_is_ready(completions: CompletionQueue[str]) -> None:
    assert not completions.is_ready
    next_has_begun = threading.Event()
    completions.submit("one", lambda: "put")

    def begin() -> str:
        next_has_begun.set()
        return "begun"

    completions.submit("one", begin)
    assert next_has_begun.wait(10)

    assert completions.is_ready
