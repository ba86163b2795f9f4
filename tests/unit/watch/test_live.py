"""The pace of what the page asks for, and what it does with failures."""

import threading

import pytest

from benchmarks.watching.samples import ManyEndpoints
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.errors import CapacityError, EndpointError, EndpointUnreachableError
from rlmesh_ray.server.observe.endpoint_status import EndpointStatus, RunnerStatus
from rlmesh_ray.watch.live import (
    PICTURE_SHARE,
    PICTURES_PER_S,
    LiveView,
    SharedAnswer,
    mean_after,
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
    assert (answer.value, answer.wait_s) == (1, 2.0)
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


@pytest.mark.parametrize("durations", [[1.0, 0.01], [3.0, *[0.002] * 99], [0.01]])
def test_pictures_of_any_durations_take_no_larger_share(durations: list[float]) -> None:
    mean_s = taken_s = paused_s = 0.0
    for took_s in durations * (2000 // len(durations)):
        mean_s = mean_after(mean_s, took_s)
        taken_s += took_s
        paused_s += picture_pause_s(mean_s)

    assert taken_s / (taken_s + paused_s) < PICTURE_SHARE * 1.01


def test_pages_share_one_attempt_to_connect_to_an_endpoint_that_hangs() -> None:
    is_asked, may_fail = threading.Event(), threading.Event()
    asked: list[str] = []

    class Hanging(ManyEndpoints):
        def connect_options(self, endpoint: EndpointStatus) -> ConnectOptions:
            asked.append(endpoint.endpoint_id)
            is_asked.set()
            assert may_fail.wait(20.0)
            raise EndpointUnreachableError("no answer in time", endpoint.address)

    live = LiveView(Hanging(1))
    key = live.endpoints()["endpoints"][0]["key"]
    page = threading.Thread(target=live.picture, args=[key, "session", 0])
    page.start()
    assert is_asked.wait(20.0)
    others = [live.picture(key, "session", lane) for lane in (0, 0, 1)]
    may_fail.set()
    page.join(20.0)
    after = live.picture(key, "session", 0)

    assert len(asked) == 1
    assert [each.png for each in others if each is not None] == [None] * 3
    assert after is not None
    assert "no answer in time" in after.problem


def test_endpoints_are_shown_where_their_runners_are_not_known() -> None:
    class Half(ManyEndpoints):
        def runners(self) -> list[RunnerStatus]:
            raise EndpointUnreachableError("the registry is restarting", "")

    found = LiveView(Half(3)).endpoints()

    assert len(found["endpoints"]) == 3
    assert (found["runners"], found["problem"]) == ([], "")


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
