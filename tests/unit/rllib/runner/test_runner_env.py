"""What a callback finds in the environment of a runner."""

from typing import Any

import numpy as np
import pytest

from rlmesh_ray.envs.lane_vector_env import LaneVectorEnv
from rlmesh_ray.envs.multi_agent import MultiAgentLane
from rlmesh_ray.envs.vector_host import describe
from rlmesh_ray.rllib.runner.multi_agent_env import MultiAgentRunnerEnv
from rlmesh_ray.rllib.runner.runner_env import RunnerEnv
from rlmesh_ray.testing.envs import SPACES, EchoEnv
from tests.ray.multi_agent_worlds import Climb


@pytest.mark.parametrize(
    ("kind", "lane"),
    [
        (RunnerEnv, lambda: EchoEnv(SPACES["box"], render_mode="rgb_array")),
        (MultiAgentRunnerEnv, lambda: MultiAgentLane(Climb())),
    ],
)
def test_what_the_endpoints_have_is_not_made_up(kind: Any, lane: Any) -> None:
    contract = describe(LaneVectorEnv([lane()]), "a name")
    env = kind(contract, 3, lambda: None, lambda name, arguments: (name,) * 3)

    assert env.render_mode == (contract.render_mode or None)
    assert env.unwrapped is env
    assert env.spec is None
    for missing in (lambda: env.step(None), env.render):
        with pytest.raises(NotImplementedError):
            missing()
    assert not env.closed
    env.close()
    assert env.closed


def test_the_generators_of_a_runners_lanes_are_at_their_endpoints() -> None:
    contract = describe(LaneVectorEnv([EchoEnv(SPACES["box"])]), "a name")
    env = RunnerEnv(contract, 3, lambda: None, lambda name, arguments: (name,) * 3)

    with pytest.raises(AttributeError, match=r"runs at its endpoint: reset\(seed=.*\) seeds it"):
        _ = env.np_random
    with pytest.raises(AttributeError, match="runs at its endpoint"):
        env.np_random = np.random.default_rng(1)
    assert env.np_random_seed == (-1, -1, -1)
