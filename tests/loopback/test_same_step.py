"""The lanes of an endpoint of any autoreset mode can be driven as if it were SAME_STEP."""

import contextlib
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlmesh_ray import DmEnvRpcSettings, EnvServer, RemoteVectorEnv
from rlmesh_ray.client.env.remote_env import require_same_step, same_step
from rlmesh_ray.errors import ConfigurationError, RemoteProtocolError
from rlmesh_ray.protocol.capabilities import PARTIAL_RESET
from rlmesh_ray.spaces.vector_infos import lane_info
from rlmesh_ray.testing.equality import assert_identical
from tests.loopback.client_internals import env_client
from tests.ray.multi_agent_worlds import Climb

NUM_STEPS = 60


class Nested(gymnasium.Env[Any, Any]):
    """Ends after as many steps as its first seed says, and has infos of steps and of resets."""

    observation_space = spaces.Dict(
        {
            "box": spaces.Box(-1.0, 1.0, (2,), np.float32),
            "pair": spaces.Tuple((spaces.Discrete(60), spaces.MultiBinary(2))),
        }
    )
    action_space = spaces.Discrete(2)
    length = count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.length = seed or self.length
        self.count = 0
        return self._observation(), {"first": self.length}

    def step(self, action: Any) -> Any:
        self.count += 1
        is_over = self.count >= self.length
        info = {"count": self.count, "odd" if self.count % 2 else "even": "yes"}
        return self._observation(), 1.0, is_over and bool(action), is_over and not action, info

    def _observation(self) -> Any:
        flags = np.array([self.count % 2, 1], np.int8)
        box = self.np_random.uniform(-1.0, 1.0, 2).astype(np.float32)
        return {"box": box, "pair": (np.int64(self.count), flags)}


def cartpole() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1")


def lanes(make: Callable[[], Any], num_envs: int, mode: AutoresetMode) -> SyncVectorEnv:
    return SyncVectorEnv([make] * num_envs, autoreset_mode=mode)


def served(make: Callable[[], Any], num_envs: int, kind: str) -> EnvServer:
    if kind.startswith("hosted "):
        mode = AutoresetMode[kind.removeprefix("hosted ")]
        return EnvServer(lambda: lanes(make, num_envs, mode))
    autoreset = kind if kind == "disabled" else "next_step"
    return EnvServer(make, num_envs=num_envs, autoreset=autoreset)


def opened(server: EnvServer, num_envs: int, kind: str) -> RemoteVectorEnv:
    if kind == "dm_env_rpc":
        settings = DmEnvRpcSettings(num_envs=num_envs)
        return RemoteVectorEnv(f"dm_env_rpc://{server.address}", dm_env_rpc=settings)
    return RemoteVectorEnv(server.address)


HOSTED = [f"hosted {mode.name}" for mode in AutoresetMode]


# Each kind with nested spaces and lanes that end at different steps; a single lane once.
@pytest.mark.parametrize(
    ("make", "kind", "num_envs"),
    [
        *((Nested, kind, 3) for kind in ("next_step", "disabled", "dm_env_rpc", *HOSTED)),
        (cartpole, "next_step", 1),
    ],
)
def test_lanes_go_on_as_those_of_gymnasiums_same_step_vector(
    make: Callable[[], Any], kind: str, num_envs: int
) -> None:
    local = lanes(make, num_envs, AutoresetMode.SAME_STEP)
    local.action_space.seed(0)
    num_ends = 0
    with served(make, num_envs, kind) as server:
        env = opened(server, num_envs, kind)
        assert_identical(env.reset(seed=4)[0], local.reset(seed=4)[0])

        for _ in range(NUM_STEPS):
            actions = local.action_space.sample()
            env.step_async(actions)
            ours = same_step(env)
            theirs: Any = local.step(actions)

            expected = [lane_info(theirs[4], lane) for lane in range(num_envs)]
            ended = np.flatnonzero(theirs[2] | theirs[3]).tolist()
            last: Any = {lane: expected[lane].pop("final_obs") for lane in ended}
            infos: Any = {lane: expected[lane].pop("final_info") for lane in ended}
            assert_identical(
                [ours.observations, ours.rewards, ours.terminated, ours.truncated],
                list(theirs[:4]),
            )
            assert_identical(ours.final_observations, last)
            if kind != "dm_env_rpc":  # which has no infos
                assert ours.reset_infos == {lane: expected[lane] for lane in ended}
                assert ours.infos == [infos.get(lane, own) for lane, own in enumerate(expected)]
            num_ends += len(ended)
        env.close()
    local.close()

    assert num_ends >= 2


def test_an_endpoint_that_resets_all_lanes_at_once_is_refused_with_the_remedy() -> None:
    with served(cartpole, 3, "next_step") as server:
        env = RemoteVectorEnv(server.address)
        require_same_step(env)

        del env_client(env).answer.capabilities[PARTIAL_RESET]  # type: ignore[attr-defined]
        with pytest.raises(ConfigurationError, match="serve-env --autoreset disabled, or have"):
            require_same_step(env)
        env.close()


def test_lanes_of_several_agents_are_refused_with_the_agents_and_the_remedy() -> None:
    with (
        EnvServer(Climb) as server,
        contextlib.closing(RemoteVectorEnv(server.address)) as env,
        pytest.raises(ConfigurationError, match=r"holds several agents \('first', 'second'\)"),
    ):
        require_same_step(env)


class Forgetful(SyncVectorEnv):
    """Resets within the step, and does not tell the last observations."""

    def step(self, actions: Any) -> Any:
        result: Any = super().step(actions)
        *step, infos = result
        return *step, {key: value for key, value in infos.items() if "final_obs" not in key}


def test_an_endpoint_that_does_not_tell_the_last_observation_is_named() -> None:
    def vector() -> SyncVectorEnv:
        return Forgetful([Nested] * 2, autoreset_mode=AutoresetMode.SAME_STEP)

    with EnvServer(vector) as server:
        env = RemoteVectorEnv(server.address)
        env.reset(seed=1)
        env.step_async(np.zeros(2, np.int64))

        with pytest.raises(RemoteProtocolError, match=f"{server.address}: lane 0 ended"):
            same_step(env)
        env.close()
