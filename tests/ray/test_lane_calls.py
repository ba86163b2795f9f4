"""Endpoints on Ray whose clients may reach into their lanes."""

from typing import Any

import gymnasium
import pytest
from gymnasium import spaces

from rlmesh_ray import RemoteVectorEnv
from rlmesh_ray.actors import EnvFleet
from rlmesh_ray.errors import ConfigurationError

pytestmark = pytest.mark.usefixtures("local_ray")


class Tasked(gymnasium.Env[Any, Any]):
    """Observes its task."""

    observation_space = spaces.Discrete(9)
    action_space = spaces.Discrete(2)
    task = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.task, {}

    def step(self, action: Any) -> Any:
        return self.task, 0.0, False, False, {}

    def set_task(self, task: int) -> None:
        self.task = task


def test_the_clients_of_a_fleet_may_call_what_its_operator_allows() -> None:
    with EnvFleet(Tasked, num_envs=2, num_cpus=0.1, allow_calls=("set_task",)) as fleet:
        env = RemoteVectorEnv(fleet.addresses[0], token=fleet.tokens[0])
        results = env.call("set_task", 4)
        observation, _ = env.reset()
        with pytest.raises(ConfigurationError, match="only set_task"):
            env.get_attr("task")
        env.close()

    assert results == (None, None)
    assert list(observation) == [4, 4]
