"""The courier, with deliveries that wait for the test."""

import threading
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

    def take(self, thing: str) -> bool:
        self.at_the_door.put(thing)
        assert self.door.acquire(timeout=TIMEOUT_S)
        if thing.startswith("broken"):
            raise ValueError(f"{thing} cannot be taken")
        self.taken.append(thing)
        return thing != "nothing"


@pytest.fixture
def recipient() -> Recipient:
    return Recipient()


@pytest.fixture
def sender(recipient: Recipient) -> LatestOnlySender[str]:
    return LatestOnlySender("the parcel was not delivered", recipient.take)


def test_of_what_waits_only_the_newest_is_delivered(
    sender: LatestOnlySender[str], recipient: Recipient
) -> None:
    sender.send("first")
    assert recipient.at_the_door.get(timeout=TIMEOUT_S) == "first"
    for thing in ("second", "third", "fourth"):
        sender.send(thing)
    recipient.door.release(2)

    assert sender.wait(TIMEOUT_S)
    assert recipient.taken == ["first", "fourth"]
    assert sender.statistics() == {"delivered": 2, "superseded": 2, "failed": 0}


def test_one_delivery_is_on_its_way_at_a_time(
    sender: LatestOnlySender[str], recipient: Recipient
) -> None:
    sender.send("first")
    sender.send("second")

    assert recipient.at_the_door.get(timeout=TIMEOUT_S)
    assert not sender.wait(timeout_s=0.01)
    assert recipient.at_the_door.empty()
    recipient.door.release(2)
    assert sender.wait(TIMEOUT_S)


def test_a_failure_is_counted_and_logged_and_the_next_is_delivered(
    sender: LatestOnlySender[str], recipient: Recipient, caplog: pytest.LogCaptureFixture
) -> None:
    recipient.door.release(2)

    sender.send("broken")
    assert sender.wait(TIMEOUT_S)
    assert sender.last_failed
    assert "the parcel was not delivered: ValueError: broken cannot be taken" in caplog.text

    sender.send("whole")
    assert sender.wait(TIMEOUT_S)
    assert not sender.last_failed
    assert sender.statistics() == {"delivered": 1, "superseded": 0, "failed": 1}


def test_nothing_is_not_counted_as_delivered(
    sender: LatestOnlySender[str], recipient: Recipient
) -> None:
    recipient.door.release()

    sender.send("nothing")

    assert sender.wait(TIMEOUT_S)
    assert sender.statistics() == {"delivered": 0, "superseded": 0, "failed": 0}


def test_an_idle_courier_has_no_thread(sender: LatestOnlySender[str], recipient: Recipient) -> None:
    recipient.door.release()
    sender.send("first")
    assert sender.wait(TIMEOUT_S)

    left = [thread for thread in threading.enumerate() if thread.name == "rlmesh-ray-sender"]
    for thread in left:
        thread.join(TIMEOUT_S)  # it may be about to end
        assert not thread.is_alive()
