"""Answers to several simulators, of which one makes the module fail."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlmesh_ray.dialects.rllink.runner.batched_inference import BatchedInference
from rlmesh_ray.dialects.rllink.runner.episode_recorder import ChosenAction


class Picky(BatchedInference):
    """Returns observations as actions; cannot bear 5."""

    def __init__(self) -> None:
        self._queue: Any = SimpleNamespace(lock=threading.Lock())
        self._fit = lambda action: 10 // action

    def _decide(self, obs: Any, weights: Any) -> list[ChosenAction]:
        if 5 in obs:
            raise ValueError("5 is too much")
        return [ChosenAction(each, np.array(each), {}, 1) for each in obs]


def request(obs: int) -> Any:
    recorder = SimpleNamespace(decide=lambda _: None, episode_id="e")
    return SimpleNamespace(obs=obs, recorder=recorder, future=Future())


@pytest.mark.parametrize(
    ("bad", "error"), [(5, ValueError), (0, RuntimeWarning)], ids=["module", "fit"]
)
def test_a_module_that_fails_fails_the_simulator_that_it_fails_for(
    bad: int, error: type[Exception]
) -> None:
    asked = [request(obs) for obs in (1, bad, 2)]

    Picky()._answer(asked, SimpleNamespace())  # type: ignore[arg-type]  # unused

    assert [each.future.result().action for each in (asked[0], asked[2])] == [10, 5]
    assert isinstance(asked[1].future.exception(), error)
