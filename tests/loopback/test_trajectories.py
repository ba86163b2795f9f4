"""A trajectory that comes through an endpoint is the in-process one, bit for bit.

Over both transports: as messages, and through shared memory where the spaces allow it.
"""

from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlmesh_ray import EnvServer, RemoteEnv, RemoteVectorEnv
from rlmesh_ray.testing.envs import SPACES, EchoEnv
from rlmesh_ray.testing.equality import assert_identical

NUM_STEPS = 40
NUM_LANES = 3
SEED = 7
TRANSPORTS = ("auto", "grpc")

ONE_LANE = ("discrete", "box of one number", "text", "nested")
"""Of these, one lane's value is no row of an array as it is."""

SOON = ("box", "image", "discrete", "text", "nested")
"""Spaces of vectors that are tested alone; alone, the other ones are at night."""
TOGETHER = gymnasium.spaces.Dict(
    {name.replace(" ", "_"): space for name, space in SPACES.items() if name not in (*SOON, "dict")}
)


@pytest.mark.parametrize("space", [SPACES[name] for name in ONE_LANE], ids=ONE_LANE)
def test_one_lane_gives_what_the_environment_gives(space: gymnasium.Space[Any]) -> None:
    def play(env: gymnasium.Env[Any, Any]) -> list[Any]:
        seen: list[Any] = [env.reset(seed=SEED)]
        for action in actions:
            seen.append(env.step(action))
            if seen[-1][2] or seen[-1][3]:
                seen.append(env.reset())
        env.close()
        return seen

    local = EchoEnv(space)
    local.action_space.seed(SEED)
    actions = [local.action_space.sample() for _ in range(NUM_STEPS)]
    expected = play(local)

    with EnvServer(lambda: EchoEnv(space)) as server:
        for transport in TRANSPORTS:
            remote = RemoteEnv(server.address, transport=transport)
            assert remote.observation_space == local.observation_space
            assert remote.action_space == local.action_space
            assert_identical(play(remote), expected)


@pytest.mark.parametrize(
    "space",
    [
        pytest.param(
            space, id=name, marks=() if name in (*SOON, "together") else pytest.mark.nightly
        )
        for name, space in (*SPACES.items(), ("together", TOGETHER))
    ],
)
def test_a_vector_gives_what_gymnasiums_sync_vector_gives(space: gymnasium.Space[Any]) -> None:
    compare(lambda: EchoEnv(space))


# Gymnasium 1.4 refuses the older version, and before it there is no newer one.
TAXI = next(env_id for env_id in ("Taxi-v4", "Taxi-v3") if env_id in gymnasium.registry)


@pytest.mark.parametrize("env_id", [pytest.param("Pendulum-v1", marks=pytest.mark.nightly), TAXI])
def test_gymnasiums_own_environments_survive_the_transport(env_id: str) -> None:
    compare(lambda: gymnasium.make(env_id))


def compare(make: Callable[[], gymnasium.Env[Any, Any]]) -> None:
    """Compare a vector of an endpoint with one in this process, over each transport."""

    def play(env: gymnasium.vector.VectorEnv[Any, Any, Any]) -> list[Any]:
        seen = [env.reset(seed=SEED), *(env.step(action) for action in actions)]
        env.close()
        return seen

    local = SyncVectorEnv([make] * NUM_LANES)
    local.action_space.seed(SEED)
    actions = [local.action_space.sample() for _ in range(NUM_STEPS)]
    expected = play(local)

    with EnvServer(make, num_envs=NUM_LANES) as server:
        for transport in TRANSPORTS:
            remote = RemoteVectorEnv(server.address, transport=transport)
            assert remote.observation_space == local.observation_space
            assert remote.single_action_space == local.single_action_space
            assert remote.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
            assert_identical(play(remote), expected)
