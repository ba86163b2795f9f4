from dataclasses import dataclass

import hypothesis
import pytest
from hypothesis import strategies as st

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.server.batch_queue import BatchQueue, BatchQueueStatistics


@dataclass(eq=False)
class Item:
    """A named item of the queue."""

    group: str
    route_key: str
    num_rows: int
    name: str


def item(name: str, rows: int = 1, *, group: str = "g", route: str = "") -> Item:
    return Item(group, route or name, rows, name)


def offered(*items: Item, max_rows: int = 8) -> BatchQueue[Item]:
    queue = BatchQueue[Item](max_rows=max_rows)
    for now_s, each in enumerate(items):
        queue.offer(each, float(now_s))
    return queue


def names(batch: tuple[Item, ...]) -> str:
    return "".join(each.name for each in batch)


def batches(queue: BatchQueue[Item], now_s: float = 100.0) -> list[str]:
    """Run the queue empty."""
    handed_out = []
    while batch := queue.next_batch(now_s):
        handed_out.append(names(batch))
        queue.done(now_s)
    return handed_out


def test_a_lone_item_does_not_wait_for_company() -> None:
    queue = offered(item("a"))

    assert names(queue.next_batch(0.0)) == "a"


def test_nothing_waiting_is_no_batch() -> None:
    queue = offered()

    assert queue.next_batch(0.0) == ()
    assert not queue.statistics().is_busy


def test_everything_that_waits_goes_together_in_arrival_order() -> None:
    assert batches(offered(item("a"), item("b"), item("c"))) == ["abc"]


def test_items_gather_while_a_batch_is_out() -> None:
    queue = offered(item("a"))
    queue.next_batch(0.0)
    queue.offer(item("b"), 1.0)
    queue.offer(item("c"), 2.0)

    assert queue.next_batch(3.0) == ()
    queue.done(4.0)

    assert names(queue.next_batch(4.0)) == "bc"


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
    queue.next_batch(2.0)
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


def test_a_cancelled_item_does_not_run() -> None:
    a, b = item("a"), item("b")
    queue = offered(a, b)

    assert queue.cancel(a)
    assert not queue.cancel(a)
    assert batches(queue) == ["b"]


def test_an_item_that_runs_cannot_be_cancelled() -> None:
    a = item("a")
    queue = offered(a)
    queue.next_batch(0.0)

    assert not queue.cancel(a)
    assert queue.statistics().cancelled == 0


def test_statistics_count_batches_and_waits() -> None:
    a, b, c = item("a", 2), item("b", 3), item("c", 4)
    queue = offered(a, b, c, item("d", 5), max_rows=8)  # at 0, 1, 2 and 3 s
    queue.cancel(c)

    queue.next_batch(10.0)
    out = queue.statistics()
    queue.done(12.5)

    assert out == BatchQueueStatistics(
        items_waiting=1,
        rows_waiting=5,
        is_busy=True,
        batches=1,
        items=2,
        rows=5,
        cancelled=1,
        waited_s=19.0,
        longest_wait_s=10.0,
        busy_s=0.0,
    )
    assert not queue.statistics().is_busy
    assert queue.statistics().busy_s == 2.5


def test_misuse_is_refused() -> None:
    a = item("a")
    queue = offered(a)

    with pytest.raises(ValueError, match="waits already"):
        queue.offer(a, 0.0)
    with pytest.raises(ValueError, match="0 rows"):
        queue.offer(item("b", 0), 0.0)
    with pytest.raises(ValueError, match="no batch is running"):
        queue.done(0.0)
    with pytest.raises(ConfigurationError, match="max_rows is 0"):
        BatchQueue[Item](max_rows=0)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=200)
@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 5), st.sampled_from("12"), st.sampled_from("rstu"))),
    st.integers(1, 6),
)
def test_every_item_runs_once_oldest_first_and_in_the_order_of_its_route(
    arrivals: list[tuple[int, str, str]], max_rows: int
) -> None:
    queue = BatchQueue[Item](max_rows=max_rows)
    for number, (num_rows, group, route) in enumerate(arrivals):
        queue.offer(Item(group, route, num_rows, str(number)), 0.0)

    ran: list[Item] = []
    while batch := queue.next_batch(0.0):
        waiting = set(range(len(arrivals))) - {int(each.name) for each in ran}
        assert int(batch[0].name) == min(waiting)
        assert len({each.group for each in batch}) == 1
        assert len({each.route_key for each in batch}) == len(batch)
        assert len(batch) == 1 or sum(each.num_rows for each in batch) <= max_rows
        ran += batch
        queue.done(0.0)

    assert sorted(int(each.name) for each in ran) == list(range(len(arrivals)))
    for route in "rstu":
        numbers = [int(each.name) for each in ran if each.route_key == route]
        assert numbers == sorted(numbers)
