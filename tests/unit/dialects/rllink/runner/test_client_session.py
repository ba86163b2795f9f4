"""Answers to several simulators, of which one makes the module fail."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlmesh_ray.dialects.rllink.runner.client_session import BatchedInference, ChosenAction


class Picky(BatchedInference):
    """Returns observations as actions; cannot bear 5."""

    def __init__(self) -> None:
        queue: Any = SimpleNamespace(
            lock=threading.Condition(), is_closed=False, weights=SimpleNamespace(), room=10
        )
        self.queue = self._queue = queue
        self._fit = lambda action: 10 // action
        self._asked, self._thread = [], None

    def _choose(self, obs: Any, weights: Any) -> list[ChosenAction]:
        if 5 in obs:
            raise ValueError("5 is too much")
        return [ChosenAction(np.array(each), {}, 1) for each in obs]


def request(obs: int) -> Any:
    return SimpleNamespace(obs=obs, choose=lambda _: None, episode_id="e", answer=Future())


@pytest.mark.parametrize(
    ("bad", "error"), [(5, ValueError), (0, RuntimeWarning)], ids=["module", "fit"]
)
def test_a_module_that_fails_fails_the_simulator_that_it_fails_for(
    bad: int, error: type[Exception]
) -> None:
    asked = [request(obs) for obs in (1, bad, 2)]

    inference = Picky()
    with inference.queue.lock:
        for each in asked:
            inference.submit(each)

    try:
        assert [each.answer.result(30).action for each in (asked[0], asked[2])] == [10, 5]
        assert isinstance(asked[1].answer.exception(30), error)
    finally:
        with inference.queue.lock:
            inference.queue.is_closed = True
            inference.queue.lock.notify_all()
