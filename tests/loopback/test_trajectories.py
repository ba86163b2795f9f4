"""A trajectory that comes through an endpoint is the in-process one, bit for bit.

Over both transports: as messages, and through shared memory where the spaces allow it.
"""

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

ONE_LANE = ("discrete", "box of one number", "text", "nested")
"""Of these, one lane's value is no row of an array as it is."""

SOON = ("box", "image", "discrete", "text", "nested")
"""Spaces of vectors that are tested alone; alone, the other ones are at night."""
TOGETHER = gymnasium.spaces.Dict(
    {name.replace(" ", "_"): space for name, space in SPACES.items() if name not in (*SOON, "dict")}
)


@pytest.mark.parametrize("space", [SPACES[name] for name in ONE_LANE], ids=ONE_LANE)
def test_one_lane_gives_what_the_environment_gives(space: gymnasium.Space[Any]) -> None:
    local = EchoEnv(space)
    local.action_space.seed(SEED)
    actions = [local.action_space.sample() for _ in range(NUM_STEPS)]

    with EnvServer(lambda: EchoEnv(space)) as server:
        remote, plain = RemoteEnv(server.address), RemoteEnv(server.address, transport="grpc")
        assert remote.observation_space == local.observation_space
        assert remote.action_space == local.action_space
        expected: Any = local.reset(seed=SEED)
        assert_identical([env.reset(seed=SEED) for env in (remote, plain)], [expected] * 2)
        for action in actions:
            expected = local.step(action)
            assert_identical([env.step(action) for env in (remote, plain)], [expected] * 2)
            if expected[2] or expected[3]:
                expected = local.reset()
                assert_identical([env.reset() for env in (remote, plain)], [expected] * 2)
        remote.close()
        plain.close()


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
    local = SyncVectorEnv([lambda: EchoEnv(space)] * NUM_LANES)

    with EnvServer(lambda: EchoEnv(space), num_envs=NUM_LANES) as server:
        remote = RemoteVectorEnv(server.address)
        plain = RemoteVectorEnv(server.address, transport="grpc")
        assert remote.observation_space == local.observation_space
        assert remote.single_action_space == local.single_action_space
        assert remote.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        local.action_space.seed(SEED)
        expected: Any = local.reset(seed=SEED)
        assert_identical([env.reset(seed=SEED) for env in (remote, plain)], [expected] * 2)
        for _ in range(NUM_STEPS):
            actions = local.action_space.sample()
            expected = local.step(actions)
            assert_identical([env.step(actions) for env in (remote, plain)], [expected] * 2)
        remote.close()
        plain.close()
    local.close()


# Gymnasium 1.4 refuses the older version, and before it there is no newer one.
TAXI = next(env_id for env_id in ("Taxi-v4", "Taxi-v3") if env_id in gymnasium.registry)


@pytest.mark.parametrize("env_id", ["Pendulum-v1", TAXI])
def test_gymnasiums_own_environments_survive_the_transport(env_id: str) -> None:
    local = gymnasium.make_vec(env_id, NUM_LANES, "sync")

    with EnvServer(env_id, num_envs=NUM_LANES) as server:
        remote = RemoteVectorEnv(server.address)
        plain = RemoteVectorEnv(server.address, transport="grpc")
        local.action_space.seed(SEED)
        expected: Any = local.reset(seed=SEED)
        assert_identical([env.reset(seed=SEED) for env in (remote, plain)], [expected] * 2)
        for _ in range(NUM_STEPS):
            actions = local.action_space.sample()
            expected = local.step(actions)
            assert_identical([env.step(actions) for env in (remote, plain)], [expected] * 2)
        remote.close()
        plain.close()
    local.close()
