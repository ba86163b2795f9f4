"""A trajectory that comes through an endpoint is the in-process one, bit for bit."""

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

IDS = list(SPACES)


@pytest.mark.parametrize("space", SPACES.values(), ids=IDS)
def test_one_lane_gives_what_the_environment_gives(space: gymnasium.Space[Any]) -> None:
    local = EchoEnv(space)
    local.action_space.seed(SEED)
    actions = [local.action_space.sample() for _ in range(NUM_STEPS)]

    with EnvServer(lambda: EchoEnv(space)) as server:
        remote = RemoteEnv(server.address)
        assert remote.observation_space == local.observation_space
        assert remote.action_space == local.action_space
        assert_identical(remote.reset(seed=SEED), local.reset(seed=SEED))
        for action in actions:
            ours, theirs = remote.step(action), local.step(action)
            assert_identical(ours, theirs)
            if theirs[2] or theirs[3]:
                assert_identical(remote.reset(), local.reset())
        remote.close()


@pytest.mark.parametrize("space", SPACES.values(), ids=IDS)
def test_a_vector_gives_what_gymnasiums_sync_vector_gives(space: gymnasium.Space[Any]) -> None:
    local = SyncVectorEnv([lambda: EchoEnv(space)] * NUM_LANES)

    with EnvServer(lambda: EchoEnv(space), num_envs=NUM_LANES) as server:
        remote = RemoteVectorEnv(server.address)
        assert remote.observation_space == local.observation_space
        assert remote.single_action_space == local.single_action_space
        assert remote.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        local.action_space.seed(SEED)
        assert_identical(remote.reset(seed=SEED), local.reset(seed=SEED))
        for _ in range(NUM_STEPS):
            actions = local.action_space.sample()
            assert_identical(remote.step(actions), local.step(actions))
        remote.close()
    local.close()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Taxi-v3"])
def test_gymnasiums_own_environments_survive_the_road(env_id: str) -> None:
    local = gymnasium.make_vec(env_id, NUM_LANES, "sync")

    with EnvServer(env_id, num_envs=NUM_LANES) as server:
        remote = RemoteVectorEnv(server.address)
        local.action_space.seed(SEED)
        assert_identical(remote.reset(seed=SEED), local.reset(seed=SEED))
        for _ in range(NUM_STEPS):
            actions = local.action_space.sample()
            assert_identical(remote.step(actions), local.step(actions))
        remote.close()
    local.close()
