from typing import Any

import pytest

from rlmesh_ray.client.env.remote_env import action_error, agents_notice
from rlmesh_ray.errors import ConformanceError
from rlmesh_ray.protocol.capabilities import MULTI_AGENT
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.multi_agent import agent_keys, describe_agents
from rlmesh_ray.spaces.spec import DiscreteSpec

ERROR = ConformanceError("structure", "", "has no key 'a'", 1)


def contract(*agents: Any) -> EnvContract:
    agents_metadata = {MULTI_AGENT: describe_agents(agent_keys(agents))} if agents else {}
    return EnvContract(
        "Duel",
        DiscreteSpec(2),
        DiscreteSpec(2),
        2,
        AutoresetMode.NEXT_STEP,
        metadata=agents_metadata,
    )


def test_the_error_about_an_action_names_the_agents_and_what_can_be_used() -> None:
    error = action_error(ERROR, contract("a", ("car", 1)))

    assert str(error).startswith("action: has no key 'a'; the action of a lane is a dict")
    assert "holds several agents ('a', ('car', 1)); use RLlib's multi-agent runner" in str(error)
    assert "with an entry for each agent, under the keys 'a', 'car_1': each lane" in str(error)
    assert (error.kind, error.path, error.lane) == ("structure", "", 1)


def test_the_keys_of_agents_that_are_numbers_are_shown_as_strings() -> None:
    error = action_error(ERROR, contract(0, 1))

    assert "under the keys '0', '1': each lane of Duel holds several agents (0, 1);" in str(error)


def test_the_error_of_a_lane_with_one_agent_says_that_it_is_about_an_action() -> None:
    assert str(action_error(ERROR, contract())) == f"action: {ERROR.reason}"


@pytest.mark.parametrize(("count", "end"), [(8, "'7');"), (11, "'7' and 3 more);")])
def test_a_crowd_is_counted(count: int, end: str) -> None:
    assert end in agents_notice(contract(*map(str, range(count))))
