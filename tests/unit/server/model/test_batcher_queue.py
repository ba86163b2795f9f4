import heapq
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from rlmesh_ray.server.model.batcher import BatchQueue
from rlmesh_ray.server.model.prediction_batch import PredictionRequest


class Item(PredictionRequest):
    """A named item of the queue."""

    def __init__(self, group: str, route_key: str, num_rows: int, name: str) -> None:
        route: Any = SimpleNamespace(group=group, key=route_key)
        slots: Any = range(num_rows)
        unused: Any = None
        super().__init__(route, b"", slots, unused)
        self.group, self.num_rows, self.name = group, num_rows, name


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


class Queue(BatchQueue):
    """A queue whose times are in seconds."""

    def offer(self, request: PredictionRequest, now_s: float) -> None:
        request.arrived_ns = _ns(now_s)
        self.waiting[request] = None

    def done(self, now_s: float) -> None:
        self.free_since_ns = _ns(now_s)

    def left_s(self, now_s: float, num_routes: int) -> float:
        return self.delay_left_s(_ns(now_s), num_routes)

    def take(self, now_s: float, num_routes: int = 0) -> list[PredictionRequest]:
        return self.next_batch(_ns(now_s), num_routes)


def item(name: str, rows: int = 1, *, group: str = "g", route: str = "") -> Item:
    return Item(group, route or name, rows, name)


def offered(*items: Item, max_rows: int = 8, max_delay_s: float = 0.0) -> Queue:
    queue = Queue(max_rows=max_rows, max_delay_s=max_delay_s)
    for now_s, each in enumerate(items):
        queue.offer(each, float(now_s))
    return queue


def names(batch: Sequence[Any]) -> str:
    return "".join(each.name for each in batch)


def batches(queue: Queue, now_s: float = 100.0) -> list[str]:
    """Run the queue empty."""
    handed_out = []
    while batch := queue.take(now_s):
        handed_out.append(names(batch))
        queue.done(now_s)
    return handed_out


def test_a_lone_item_does_not_wait_for_company() -> None:
    queue = offered(item("a"))

    assert names(queue.take(0.0)) == "a"


def test_nothing_waiting_is_no_batch() -> None:
    queue = offered()

    assert queue.take(0.0) == []


def test_everything_that_waits_goes_together_in_arrival_order() -> None:
    assert batches(offered(item("a"), item("b"), item("c"))) == ["abc"]


def test_items_gather_while_a_batch_is_out() -> None:
    queue = offered(item("a"))
    queue.take(0.0)
    queue.offer(item("b"), 1.0)
    queue.offer(item("c"), 2.0)

    queue.done(4.0)

    assert names(queue.take(4.0)) == "bc"


def test_a_batch_has_at_most_max_rows() -> None:
    queue = [item("a", 3), item("b", 3), item("c", 3), item("d", 1)]

    assert batches(offered(*queue, max_rows=6)) == ["ab", "cd"]


def test_a_later_item_does_not_overtake_one_that_did_not_fit() -> None:
    assert batches(offered(item("a", 3), item("b", 4), item("c", 1), max_rows=6)) == ["a", "bc"]


def test_an_item_larger_than_max_rows_runs_alone() -> None:
    assert batches(offered(item("a", 9), item("b", 1), max_rows=6)) == ["a", "b"]


def test_groups_do_not_mix_and_the_oldest_goes_first() -> None:
    queue = [item("a", group="1"), item("b", group="2"), item("c", group="1")]

    assert batches(offered(*queue)) == ["ac", "b"]


def test_a_busy_group_does_not_starve_another() -> None:
    queue = offered(item("a", group="1"), item("b", group="2"))
    queue.take(2.0)
    queue.offer(item("c", group="1"), 3.0)
    queue.done(4.0)

    assert batches(queue) == ["b", "c"]


def test_a_batch_holds_one_item_of_a_route() -> None:
    queue = [item("a", route="r"), item("b", route="r"), item("c", route="s")]

    assert batches(offered(*queue)) == ["ac", "b"]


def test_an_item_does_not_overtake_an_older_one_of_its_route_in_another_group() -> None:
    queue = [
        item("a", group="1", route="q"),
        item("b", group="2", route="r"),
        item("c", group="1", route="r"),
    ]

    assert batches(offered(*queue)) == ["a", "b", "c"]


def test_a_delayed_batch_waits_for_more_from_its_first_item_on() -> None:
    queue = offered(item("a"), item("b"), max_delay_s=3.0)  # at 0 and 1 s

    assert queue.left_s(2.5, num_routes=3) == pytest.approx(0.5)
    assert queue.take(2.5, num_routes=3) == []
    assert queue.left_s(3.0, num_routes=3) == 0.0
    assert names(queue.take(3.0, num_routes=3)) == "ab"


def test_a_delay_begins_when_the_device_becomes_free() -> None:
    queue = offered(item("a"), max_delay_s=3.0)
    queue.take(5.0, num_routes=3)
    queue.offer(item("b"), 6.0)
    queue.done(20.0)

    assert queue.left_s(21.0, num_routes=3) == pytest.approx(2.0)
    assert names(queue.take(23.0, num_routes=3)) == "b"


@pytest.mark.parametrize(
    ("items", "num_routes", "batch"),
    [
        ([item("a"), item("b")], 2, "ab"),
        ([item("a"), item("b", group="2")], 2, "a"),
        ([item("a", 3), item("b", 5)], 3, "ab"),
        ([item("a", 3), item("b", 6)], 3, "a"),
        ([item("a", 9)], 3, "a"),
    ],
    ids=["each route asks", "each asks, in two groups", "full", "too much", "too large"],
)
def test_a_batch_that_cannot_grow_is_not_delayed(
    items: Sequence[Item], num_routes: int, batch: str
) -> None:
    queue = offered(*items, max_delay_s=60.0)

    assert names(queue.take(0.0, num_routes)) == batch


def test_two_items_of_a_route_are_not_taken_for_two_routes() -> None:
    queue = offered(item("a", route="r"), item("b", route="r"), max_delay_s=60.0)

    assert queue.take(1.0, num_routes=2) == []


def answers_of(
    round_trips_s: Sequence[float], *, max_rows: int = 8, max_delay_s: float = 0.0
) -> list[int]:
    """Serve clients for 10 s, each of which asks again its round trip after an answer.

    A batch takes 20 ms. Returns how often each client was answered.
    """
    queue = Queue(max_rows=max_rows, max_delay_s=max_delay_s)
    answers, num_routes, now_s = [0] * len(round_trips_s), len(round_trips_s), 0.0
    asks = [(each_s, client) for client, each_s in enumerate(round_trips_s)]
    heapq.heapify(asks)

    def arrive() -> None:
        while asks and asks[0][0] <= now_s:
            asked_s, client = heapq.heappop(asks)
            queue.offer(item(str(client)), asked_s)

    while now_s < 10.0:
        arrive()
        batch = queue.take(now_s, num_routes)
        if not batch:
            left_s = queue.left_s(now_s, num_routes)
            now_s = min([*(asked_s for asked_s, _ in asks[:1]), *([now_s + left_s] * bool(left_s))])
            continue
        now_s += 0.02
        arrive()
        queue.done(now_s)
        for each in batch:
            client = int(names([each]))
            answers[client] += 1
            heapq.heappush(asks, (now_s + round_trips_s[client], client))
    return answers


MOST = 8 * 10.0 / 0.02
"""Answers to eight clients in 10 s, in batches of eight one after the other."""
SIMILAR_S = [0.0005 + 0.0001 * client for client in range(8)]


def test_a_delay_keeps_clients_that_ask_again_at_once_in_one_batch() -> None:
    at_once = answers_of(SIMILAR_S)
    delayed = answers_of(SIMILAR_S, max_delay_s=0.002)

    assert sum(at_once) / MOST == pytest.approx(0.5, abs=0.02)  # one and seven of them by turns
    assert sum(delayed) / MOST > 0.9


def test_a_delayed_batch_waits_for_a_straggler_no_longer_than_the_delay() -> None:
    *others, straggler = answers_of([*SIMILAR_S[:7], 1.0], max_delay_s=0.002)

    assert straggler == 9
    assert min(others) > 0.9 * 10.0 / (0.02 + SIMILAR_S[6] + 0.002)


@pytest.mark.parametrize("max_delay_s", [0.0, 0.002, 0.05])
@pytest.mark.parametrize("max_rows", [1, 3, 8])
def test_no_client_gets_less_than_half_of_the_answers_of_another(
    max_rows: int, max_delay_s: float
) -> None:
    uneven_s = [0.0005 * 1.6**client for client in range(8)]  # up to 13 ms
    answers = answers_of(uneven_s, max_rows=max_rows, max_delay_s=max_delay_s)

    # At worst one that asks again later than others misses every second batch.
    assert min(answers) + 1 >= max(answers) / 2


@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 5), st.sampled_from("12"), st.sampled_from("rstu"))),
    st.integers(1, 6),
)
def test_every_item_runs_once_oldest_first_and_in_the_order_of_its_route(
    arrivals: list[tuple[int, str, str]], max_rows: int
) -> None:
    queue = Queue(max_rows=max_rows)
    for number, (num_rows, group, route) in enumerate(arrivals):
        queue.offer(Item(group, route, num_rows, str(number)), 0.0)

    ran: list[Any] = []
    while True:
        batch: Any = queue.take(0.0)
        if not batch:
            break
        waiting = set(range(len(arrivals))) - {int(each.name) for each in ran}
        assert int(batch[0].name) == min(waiting)
        assert len({each.group for each in batch}) == 1
        assert len({each.route.key for each in batch}) == len(batch)
        assert len(batch) == 1 or sum(each.num_rows for each in batch) <= max_rows
        ran += batch
        queue.done(0.0)

    assert sorted(int(each.name) for each in ran) == list(range(len(arrivals)))
    for route in "rstu":
        numbers = [int(each.name) for each in ran if each.route.key == route]
        assert numbers == sorted(numbers)
