"""What callbacks and runner subclasses get when they use the environment as with RLlib."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.rllib.runner.runner_env import MultiAgentRunnerEnv, RunnerEnv
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.multi_agent import lane_observation_space
from rlmesh_ray.spaces.spec import DictSpec

BOX = from_gymnasium(spaces.Box(-1.0, 1.0, (2,), np.float32))
OF_AGENT = DictSpec((("a", BOX),))


def nothing(*_: Any) -> Any:
    return ()


@pytest.fixture(params=["single agent", "several agents"])
def env(request: pytest.FixtureRequest) -> Any:
    if request.param == "single agent":
        contract = EnvContract("Toy-v0", BOX, BOX, 2, AutoresetMode.NEXT_STEP)
        return RunnerEnv(contract, 2, nothing, nothing)
    metadata = {capabilities.MULTI_AGENT: {"agents": ["a"]}}
    contract = EnvContract(
        "Toy-v0",
        lane_observation_space(OF_AGENT),
        OF_AGENT,
        2,
        AutoresetMode.NEXT_STEP,
        metadata=metadata,
    )
    return MultiAgentRunnerEnv(contract, 2, nothing, nothing)


def test_an_environment_that_the_runner_steps_says_what_to_call_instead(env: Any) -> None:
    lanes: list[MultiAgentEnv] = getattr(env, "envs", [])
    for each in (env, *lanes):
        for method, arguments in (("reset", ()), ("step", ([],))):
            with pytest.raises(ConfigurationError, match=rf"env\.{method}\(\), call env_runner\.s"):
                getattr(each, method)(*arguments)
        with pytest.raises(ConfigurationError, match=r'env\.call\("render"\)'):
            each.render()


def test_an_attribute_is_set_to_one_value_in_every_lane(
    env: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(env, "_call", lambda *call: calls.append(call))

    env.set_attr("gravity", 9.8)
    with pytest.raises(ConfigurationError, match=r"list for one value per lane; to set the list i"):
        env.set_attr("gravity", [9.8, 1.6])

    assert calls == [("set_wrapper_attr", ("gravity", 9.8))]


def test_what_the_endpoints_have_is_not_made_up(env: Any) -> None:
    assert env.render_mode is None
    assert env.unwrapped is env
    assert env.spec is None
    assert not env.closed
    env.close()
    assert env.closed
