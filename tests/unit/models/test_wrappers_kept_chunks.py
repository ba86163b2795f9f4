"""Chunks that an endpoint keeps for clients that take one action at a time."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlmesh_ray.errors import ConfigurationError, PolicyError
from rlmesh_ray.models.policy import (
    ChunkRouteRows,
    Policy,
    PolicyTraits,
    RouteRows,
    Rows,
    UpdatablePolicy,
    traits_of,
)
from rlmesh_ray.models.wrappers import KeptChunks, with_replay
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.spec import BoxSpec, DictSpec, DiscreteSpec, SpaceSpec, TextSpec

BOX = BoxSpec((1,), "float32", np.float32(-999).tobytes(), np.float32(999).tobytes())


def contract(actions: SpaceSpec = BOX) -> EnvContract:
    return EnvContract("Test-v0", BOX, actions, 4, AutoresetMode.DISABLED)


class Counting:
    """Counts on from each observation, for three steps; remembers what it was asked."""

    def __init__(self, horizon: int = 3) -> None:
        self.traits = PolicyTraits(is_repeatable=True, horizon=horizon)
        self.asked: list[list[float]] = []
        self.forgotten: list[tuple[str, int | None]] = []
        self.error: Exception | None = None

    def check_contract(self, contract: EnvContract) -> None:
        pass

    def predict(self, contract: EnvContract, rows: Rows) -> Any:
        first = np.asarray(rows.observations)
        assert rows.num_rows == len(first)
        self.asked.append(first[:, 0].tolist())
        if self.error is not None:
            raise self.error
        return (first + np.arange(3, dtype=np.float32))[..., None]

    def forget(self, route_key: str, env_index: int | None) -> None:
        self.forgotten.append((route_key, env_index))


class Learning(Counting):
    """Takes weights."""

    def get_weights(self) -> object:
        return "weights"

    def set_weights(self, weights: object) -> None:
        self.asked.append([])


def slot(lane: int, episode: str = "", *, reset: bool = False) -> PredictSlot:
    return PredictSlot(lane, episode, 0, reset)


def rows(numbers: Sequence[float], *routes: RouteRows) -> Rows:
    return Rows(np.array(numbers, np.float32)[:, None], routes)


def first_actions(policy: Policy, batch: Rows) -> list[float]:
    """Return the actions for this step."""
    chunks: Any = policy.predict(contract(), batch)
    assert chunks.shape == (batch.num_rows, 3, 1)
    actions: list[float] = chunks[:, 0, 0].tolist()
    return actions


def test_the_policy_is_asked_when_a_lane_s_chunk_is_used_up() -> None:
    policy = Counting()
    kept = KeptChunks(policy)

    acted = [
        first_actions(kept, rows([number, 100 + number], RouteRows("r", [slot(0), slot(1)])))
        for number in range(0, 50, 10)
    ]

    assert acted == [[0, 100], [1, 101], [2, 102], [30, 130], [31, 131]]
    assert policy.asked == [[0, 100], [30, 130]]


def test_lanes_use_up_their_chunks_apart_from_each_other() -> None:
    policy = Counting()
    kept = KeptChunks(policy)

    acted = [
        first_actions(kept, rows([10], RouteRows("r", [slot(0)]))),
        first_actions(kept, rows([20, 60], RouteRows("r", [slot(0)]), RouteRows("s", [slot(0)]))),
        first_actions(kept, rows([30, 40], RouteRows("r", [slot(1), slot(0)]))),
        first_actions(kept, rows([50, 70], RouteRows("r", [slot(0)]), RouteRows("s", [slot(0)]))),
    ]

    assert acted == [[10], [11, 60], [30, 12], [50, 61]]
    assert policy.asked == [[10], [60], [30], [50]]


@pytest.mark.parametrize(
    ("begun", "then", "goes_on"),
    [
        (slot(0, "a"), slot(0, "a"), True),
        (slot(0, "a"), slot(0, "b"), False),
        (slot(0, "a"), slot(0, "a", reset=True), False),
        (slot(0, "a"), slot(0, ""), True),
        (slot(0), slot(0, reset=True), False),
        (slot(0, "a", reset=True), slot(0, "a"), True),
    ],
)
def test_a_chunk_ends_with_its_episode(
    begun: PredictSlot, then: PredictSlot, goes_on: bool
) -> None:
    kept = KeptChunks(Counting())

    first_actions(kept, rows([10], RouteRows("r", [begun])))

    expected = 11 if goes_on else 20
    assert first_actions(kept, rows([20], RouteRows("r", [then]))) == [expected]


@pytest.mark.parametrize("lane", [0, None])
def test_a_forgotten_lane_has_no_chunk_any_more(lane: int | None) -> None:
    policy = Counting()
    kept = KeptChunks(policy)
    first_actions(kept, rows([10], RouteRows("r", [slot(0)])))

    kept.forget("r", lane)

    assert first_actions(kept, rows([20], RouteRows("r", [slot(0)]))) == [20]
    assert policy.forgotten == [("r", lane)]


def test_rows_of_clients_that_take_chunks_are_passed_on() -> None:
    policy = Counting()
    kept = KeptChunks(policy)
    routes = RouteRows("one", [slot(0)]), ChunkRouteRows("all", [slot(0)])
    first_actions(kept, rows([10, 50], *routes))

    chunks: Any = kept.predict(contract(), rows([20, 60], *routes))

    assert chunks[:, 0, 0].tolist() == [11, 60]
    assert chunks[1, :, 0].tolist() == [60, 61, 62]
    assert policy.asked == [[10, 50], [60]]


def test_a_policy_that_fails_costs_no_action_of_any_chunk() -> None:
    policy = Counting()
    kept = KeptChunks(policy)
    first_actions(kept, rows([10], RouteRows("r", [slot(0)])))
    policy.error = PolicyError("no idea")
    both = rows([20, 30], RouteRows("r", [slot(0), slot(1)]))

    for _ in range(2):
        with pytest.raises(PolicyError, match="no idea"):
            kept.predict(contract(), both)
    policy.error = None

    assert first_actions(kept, both) == [11, 30]


def test_a_refused_request_costs_no_other_lane_an_action() -> None:
    class Unsound(Counting):
        def predict(self, contract: EnvContract, rows: Rows) -> Any:
            chunks = super().predict(contract, rows)
            chunks[chunks == 11] = np.nan  # the second action of lane 0's first chunk
            return chunks

    kept = KeptChunks(Unsound())
    routes = RouteRows("r", [slot(0), slot(1)]), RouteRows("s", [slot(0)])

    acted = [
        first_actions(kept, rows([number, 100 + number, 200 + number], *routes))
        for number in (10, 20, 30)
    ]

    assert acted[0] == [10, 110, 210]
    assert np.isnan(acted[1][0])  # so the server refuses the request of route r
    assert acted[1][1:] == [111, 211]
    assert acted[2] == [30, 111, 212]


def test_actions_of_several_leaves_are_kept_together() -> None:
    space = DictSpec((("a", DiscreteSpec(9)), ("b", TextSpec(0, 9, ""))))

    class Speaking(Counting):
        def predict(self, contract: EnvContract, rows: Rows) -> Any:
            return {"a": [[1, 2, 3]], "b": [["one", "two", "three"]]}

    kept, row = KeptChunks(Speaking()), rows([0], RouteRows("r", [slot(0)]))

    found: list[Any] = [kept.predict(contract(space), row) for _ in range(4)]

    assert [each["a"][0, 0] for each in found] == [1, 2, 3, 1]
    assert [each["b"][0, 0] for each in found] == ["one", "two", "three", "one"]


@pytest.mark.parametrize("actions", [np.zeros((1, 1)), np.zeros((1, 2, 1)), [[[1], [2]]]])
def test_actions_of_another_shape_are_refused(actions: object) -> None:
    class Wrong(Counting):
        def predict(self, contract: EnvContract, rows: Rows) -> Any:
            return actions

    with pytest.raises(PolicyError, match=r"expected \(1, 3, 1\) \(rows, horizon, \*action\)"):
        KeptChunks(Wrong()).predict(contract(), rows([0], RouteRows("r", [slot(0)])))


def test_the_operator_s_choice_decides_what_is_served() -> None:
    plain, learning = Counting(), Learning()

    assert with_replay(plain, "first") is plain
    kept, updatable = with_replay(plain, "kept"), with_replay(learning, "kept")

    assert traits_of(kept).kind == "Counting"
    assert (traits_of(kept).horizon, traits_of(kept).is_repeatable) == (3, True)
    plain.traits = replace(plain.traits, observation_map=("state = v",))
    assert traits_of(kept).observation_map == ("state = v",)
    assert isinstance(kept, Policy)
    assert not isinstance(kept, UpdatablePolicy)
    assert isinstance(updatable, UpdatablePolicy)
    updatable.set_weights(updatable.get_weights())
    assert learning.asked == [[]]


def test_choices_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="'last' is not one of first, kept"):
        with_replay(Counting(), "last")
    with pytest.raises(ConfigurationError, match=r"needs a policy that chooses several .*horizon"):
        with_replay(Counting(horizon=1), "kept")
