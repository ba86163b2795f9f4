"""The sender of weights, with deliveries that wait for the test."""

import threading
from functools import partial
from queue import Queue

import pytest

from rlmesh_ray.rllib.weights.publisher import LatestOnlySender

TIMEOUT_S = 10.0


class Recipient:
    """Takes what is delivered, when the test lets it."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.at_the_door: Queue[str] = Queue()
        self.door = threading.Semaphore(0)
        self._sender = LatestOnlySender()
        self.wait, self.statistics = self._sender.wait, self._sender.statistics

    def send(self, thing: str) -> None:
        self._sender.send(partial(self._take, thing))

    @property
    def last_failed(self) -> bool:
        return self._sender.last_failed

    def _take(self, thing: str) -> bool:
        self.at_the_door.put(thing)
        assert self.door.acquire(timeout=TIMEOUT_S)
        if thing.startswith("broken"):
            raise ValueError(f"{thing} cannot be taken")
        self.taken.append(thing)
        return thing != "nothing"


@pytest.fixture
def recipient() -> Recipient:
    return Recipient()


def test_of_what_waits_only_the_newest_is_delivered(recipient: Recipient) -> None:
    recipient.send("first")
    assert recipient.at_the_door.get(timeout=TIMEOUT_S) == "first"
    for thing in ("second", "third", "fourth"):
        recipient.send(thing)
    recipient.door.release(2)

    assert recipient.wait(TIMEOUT_S)
    assert recipient.taken == ["first", "fourth"]
    assert recipient.statistics() == {"delivered": 2, "superseded": 2, "failed": 0}


def test_one_delivery_is_on_its_way_at_a_time(recipient: Recipient) -> None:
    recipient.send("first")
    recipient.send("second")

    assert recipient.at_the_door.get(timeout=TIMEOUT_S)
    assert not recipient.wait(timeout_s=0.01)
    assert recipient.at_the_door.empty()
    recipient.door.release(2)
    assert recipient.wait(TIMEOUT_S)


def test_a_failure_is_counted_and_logged_and_the_next_is_delivered(
    recipient: Recipient, caplog: pytest.LogCaptureFixture
) -> None:
    recipient.door.release(2)

    recipient.send("broken")
    assert recipient.wait(TIMEOUT_S)
    assert recipient.last_failed
    words = "the newest weights have not reached the served policy: ValueError: broken cannot be"
    assert words in caplog.text

    recipient.send("whole")
    assert recipient.wait(TIMEOUT_S)
    assert not recipient.last_failed
    assert recipient.statistics() == {"delivered": 1, "superseded": 0, "failed": 1}


def test_nothing_is_not_counted_as_delivered(recipient: Recipient) -> None:
    recipient.door.release()

    recipient.send("nothing")

    assert recipient.wait(TIMEOUT_S)
    assert recipient.statistics() == {"delivered": 0, "superseded": 0, "failed": 0}
