"""Policies that choose several actions at once, over real gRPC, in both dialects."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlmesh_ray import ModelServer, RemoteModel, Slots
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium

HORIZON = 3


def contract(action: gymnasium.Space[Any], *, lanes: int = 2) -> EnvContract:
    """Return the contract of an environment whose observations are pairs of numbers."""
    return EnvContract(
        "Pairs-v0",
        from_gymnasium(spaces.Box(-99.0, 99.0, (2,), np.float32)),
        from_gymnasium(action),
        lanes,
        AutoresetMode.DISABLED,
    )


BOX = contract(spaces.Box(-999.0, 999.0, (1,), np.float32))
OBSERVATIONS = np.array([[1, 0], [5, 0]], np.float32)


class Counting:
    """Chooses the first number of each observation, and counts on from there."""

    horizon = HORIZON

    def __init__(self) -> None:
        self.asked: list[list[float]] = []

    def __call__(self, observations: Any) -> Any:
        self.asked.append(observations[:, 0].tolist())
        steps = np.arange(self.horizon, dtype=np.float32)
        return (observations[:, :1] + steps)[..., None]


def slots(*episodes: str, reset: bool = False) -> Slots:
    rows = range(len(episodes))
    return Slots(list(rows), list(episodes), [0 for _ in rows], [reset for _ in rows])


def test_a_client_gets_the_chunks_of_all_rows() -> None:
    with ModelServer(Counting()) as server, RemoteModel(server.address) as model:
        model.configure_route(BOX)

        chunks = model.predict_chunk(OBSERVATIONS)
        telemetry = model.last_telemetry()

    assert (chunks.dtype, chunks.shape) == (np.float32, (2, HORIZON, 1))
    assert chunks[..., 0].tolist() == [[1, 2, 3], [5, 6, 7]]
    assert telemetry is not None
    assert telemetry.batch_rows == 2


def test_a_client_that_takes_one_action_gets_the_first_of_a_new_chunk() -> None:
    policy = Counting()
    with ModelServer(policy) as server, RemoteModel(server.address) as model:
        model.configure_route(BOX)

        actions = [model.predict(OBSERVATIONS).tolist() for _ in range(2)]

    assert actions == [[[1], [5]]] * 2
    assert policy.asked == [[1, 5]] * 2


def test_a_policy_of_one_action_gives_chunks_of_one() -> None:
    with (
        ModelServer(lambda observations: observations[:, :1]) as server,
        RemoteModel(server.address) as model,
    ):
        model.configure_route(BOX)

        chunks = model.predict_chunk(OBSERVATIONS)

    assert chunks.tolist() == [[[1]], [[5]]]


def test_a_route_may_ask_for_fewer_actions() -> None:
    with ModelServer(Counting()) as server, RemoteModel(server.address) as model:
        model.configure_route(BOX, route_id="short", horizon=2)
        model.configure_route(BOX, route_id="whole")

        chunks = [
            model.predict_chunk(OBSERVATIONS, route_id=route)[..., 0].tolist()
            for route in ("short", "whole", "short")
        ]

    assert chunks == [[[1, 2], [5, 6]], [[1, 2, 3], [5, 6, 7]], [[1, 2], [5, 6]]]
