"""Columns of several agents, and contracts that say that there are several."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray.errors import ConformanceError, ContractMismatchError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.rllib.multi_agent_columns import AgentColumns
from rlmesh_ray.rllib.multi_agent_contract import AgentSpec, agents_of_lane
from rlmesh_ray.spaces.batch import stack
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym import from_gymnasium
from rlmesh_ray.spaces.multi_agent import filler, lane_observation
from rlmesh_ray.spaces.spec import DictSpec
from rlmesh_ray.testing.envs import SPACES

BOX = from_gymnasium(spaces.Box(-1.0, 1.0, (2,), np.float32))
DISCRETE = from_gymnasium(spaces.Discrete(3, start=5))
NOBODY = np.zeros(2, np.bool_)


def contract(agents: Any = ("b", "a"), **changes: Any) -> EnvContract:
    own = DictSpec((("b", BOX), ("a", DISCRETE)))
    fields = {
        "id": "pair",
        "observation_space": lane_observation(own),
        "action_space": own,
        "num_envs": 2,
        "autoreset_mode": AutoresetMode.NEXT_STEP,
        "metadata": {capabilities.MULTI_AGENT: {"agents": list(agents)}},
    }
    return EnvContract(**{**fields, **changes})


def test_a_contract_gives_the_agents_in_their_order() -> None:
    assert agents_of_lane(contract()) == (
        AgentSpec("b", BOX, BOX),
        AgentSpec("a", DISCRETE, DISCRETE),
    )


@pytest.mark.parametrize(
    "broken",
    [
        contract(metadata={}),
        contract(metadata={capabilities.MULTI_AGENT: ["a", "b"]}),
        contract(metadata={capabilities.MULTI_AGENT: {"agents": 2}}),
        contract(agents=()),
        contract(agents=("a", "b")),
        contract(agents=("b", "a", "c")),
        contract(action_space=DISCRETE),
        contract(action_space=DictSpec((("a", DISCRETE), ("b", BOX)))),
        contract(observation_space=BOX),
        contract(observation_space=DictSpec((("b", BOX), ("a", DISCRETE)))),
        contract(observation_space=lane_observation(DictSpec(()))),
        contract(observation_space=DictSpec((("observations", BOX),))),
    ],
)
def test_a_contract_that_contradicts_itself_is_refused(broken: EnvContract) -> None:
    with pytest.raises(ContractMismatchError, match="serve it with this package's EnvServer"):
        agents_of_lane(broken)


@pytest.mark.parametrize("name", SPACES)
def test_actions_of_any_space_arrive_as_they_were(name: str) -> None:
    space = SPACES[name]
    spec = from_gymnasium(space)
    columns = AgentColumns([AgentSpec("b", BOX, BOX), AgentSpec("a", spec, spec)])
    space.seed(1)
    action = space.sample()

    sent = columns.actions([{"a": action}, {}], np.array([[False, True], [False, False]]), NOBODY)

    absent = np.zeros(2, np.float32)
    whole = DictSpec((("b", BOX), ("a", spec)))
    lanes = [{"b": absent, "a": action}, {"b": absent, "a": filler(spec)}]
    for mine, expected in zip(sent, stack(whole, lanes), strict=True):
        np.testing.assert_array_equal(mine, expected)


def test_actions_of_a_lane_that_does_not_look_at_them_are_not_looked_at() -> None:
    columns = AgentColumns([AgentSpec("a", DISCRETE, DISCRETE)])

    sent = columns.actions(
        [{"a": 6}, {"bus": 3}], np.array([[True], [False]]), ~np.array([1, 0], bool)
    )

    np.testing.assert_array_equal(sent[0], [6, 5])


def test_an_action_of_the_wrong_structure_names_its_agent() -> None:
    columns = AgentColumns([AgentSpec("a", BOX, BOX)])

    with pytest.raises(ConformanceError, match=r"a: has shape \(3,\), expected \(2,\)"):
        columns.actions([{"a": np.zeros(3)}], np.array([[True]]), NOBODY[:1])


def test_infos_that_belong_to_no_agent_are_common() -> None:
    columns = AgentColumns([AgentSpec("a", BOX, BOX), AgentSpec("b", BOX, BOX)])
    infos = {"a": {"x": 1}, "b": "odd", "__common__": {"y": 2}, "rlmesh.conformance.warning": ["z"]}

    assert columns.infos(infos) == {
        "a": {"x": 1},
        "__common__": {"y": 2, "b": "odd", "rlmesh.conformance.warning": ["z"]},
    }
    assert columns.infos({"b": {}}) == {"b": {}}
