"""The pace of what the page asks for, and what it does with failures."""

import threading

import pytest

from benchmarks.watching.samples import ManyEndpoints
from rlmesh_ray.errors import CapacityError, EndpointError
from rlmesh_ray.watch.live import (
    PICTURE_SHARE,
    PICTURES_PER_S,
    LiveView,
    SharedAnswer,
    picture_pause_s,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_question_is_asked_again_only_after_its_pause() -> None:
    clock = Clock()
    answer = SharedAnswer[int](clock)
    asked: list[int] = []

    def question() -> int:
        asked.append(1)
        clock.now_s += 0.5
        return len(asked)

    for _ in range(3):
        answer.ask(question, lambda took_s: 4 * took_s)
    assert (answer.value, answer.took_s, answer.wait_s) == (1, 0.5, 2.0)
    clock.now_s += 2.0
    answer.ask(question, lambda took_s: 4 * took_s)
    assert answer.value == 2


def test_a_question_that_another_thread_asks_is_not_waited_for() -> None:
    answer = SharedAnswer[int]()
    is_asked, may_answer = threading.Event(), threading.Event()

    def slow() -> int:
        is_asked.set()
        assert may_answer.wait(20.0)
        return 1

    thread = threading.Thread(target=answer.ask, args=[slow, lambda took_s: 0.0])
    thread.start()
    assert is_asked.wait(20.0)
    answer.ask(lambda: 2, lambda took_s: 0.0)
    assert answer.value is None
    may_answer.set()
    thread.join(20.0)
    assert answer.value == 1


def test_a_failure_keeps_the_last_answer_and_says_why() -> None:
    clock = Clock()
    answer = SharedAnswer[int](clock)
    answer.ask(lambda: 7, lambda took_s: 0.0)

    def fails() -> int:
        raise EndpointError("it is gone", "192.0.2.1:1")

    answer.ask(fails, lambda took_s: 0.0)
    assert answer.value == 7
    assert "it is gone" in answer.problem
    answer.ask(lambda: 8, lambda took_s: 0.0)
    assert (answer.value, answer.problem) == (8, "")


def test_the_turn_of_another_observer_is_no_problem() -> None:
    answer = SharedAnswer[int]()

    def full() -> int:
        raise CapacityError("ask less often", "192.0.2.1:1")

    answer.ask(full, lambda took_s: 0.0)
    assert "less often" in answer.problem
    answer.ask(lambda: 7, lambda took_s: 0.0)
    answer.ask(full, lambda took_s: 0.0)
    assert (answer.value, answer.problem) == (7, "")


@pytest.mark.parametrize("took_s", [0.0, 1e-4, 0.002, 0.05, 3.0])
def test_pictures_take_no_larger_share_and_are_no_more_than_the_page_names(took_s: float) -> None:
    period_s = took_s + picture_pause_s(took_s)

    assert took_s <= PICTURE_SHARE * period_s * 1.000001
    assert period_s >= 1 / PICTURES_PER_S * 0.999999


def test_endpoints_are_in_order_with_what_is_known_of_them() -> None:
    found = LiveView(ManyEndpoints(11)).endpoints()

    assert [each["endpoint_id"] for each in found["endpoints"][1:3]] == ["hills/1", "hills/2"]
    assert [each["state"] for each in found["endpoints"][:3]] == ["live", "stale", "retiring"]
    assert found["endpoints"][0]["lane_steps_per_s"] == pytest.approx(4 * 4000 / 3)
    assert found["endpoints"][9]["service"] == "model"
    assert found["endpoints"][9]["rows_per_batch"] == 8
    assert (found["source"], found["problem"]) == ("many endpoints", "")


def test_what_is_not_among_the_endpoints_is_not_asked() -> None:
    live = LiveView(ManyEndpoints(2))
    assert live.sessions("hills hills/0") is None  # nothing has been listed yet

    key = live.endpoints()["endpoints"][0]["key"]

    assert live.sessions("192.0.2.9:5555") is None
    assert live.picture("192.0.2.9:5555", "session", 0) is None
    assert "nothing answers" in str(live.sessions(key))
    picture = live.picture(key, "session", 0)
    assert picture is not None
    assert picture.png is None
    assert "nothing answers" in picture.problem
