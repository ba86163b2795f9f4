"""Columns of several agents, and contracts that say that there are several."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from ray.rllib.env.multi_agent_env import make_multi_agent
from ray.rllib.examples.envs.classes.multi_agent.guess_the_number_game import GuessTheNumberGame
from ray.rllib.examples.envs.classes.multi_agent.two_step_game import (
    TwoStepGame,
    TwoStepGameWithGroupedAgents,
)

from rlmesh_ray.envs.lane_vector_env import LaneVectorEnv
from rlmesh_ray.envs.multi_agent import MultiAgentLane
from rlmesh_ray.envs.vector_host import describe
from rlmesh_ray.errors import ConformanceError, ContractMismatchError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.rllib.runner.autoreset_emulation import SessionBatch
from rlmesh_ray.rllib.runner.session_group import AgentColumns, AgentSpec, agents_of_lane
from rlmesh_ray.spaces.batch import stack
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.multi_agent import filler, lane_observation_space
from rlmesh_ray.spaces.spec import DictSpec
from rlmesh_ray.testing.envs import SPACES
from rlmesh_ray.wire.rlmesh_v1.specs import contract_from_proto, contract_to_proto

BOX = from_gymnasium(spaces.Box(-1.0, 1.0, (2,), np.float32))
DISCRETE = from_gymnasium(spaces.Discrete(3, start=5))
NONE_IGNORED = np.zeros(2, np.bool_)


def contract(agents: Any = ("b", "a"), **changes: Any) -> EnvContract:
    own = DictSpec((("b", BOX), ("a", DISCRETE)))
    fields = {
        "id": "pair",
        "observation_space": lane_observation_space(own),
        "action_space": own,
        "num_envs": 2,
        "autoreset_mode": AutoresetMode.NEXT_STEP,
        "metadata": {capabilities.MULTI_AGENT: {"agents": list(agents)}},
    }
    return EnvContract(**{**fields, **changes})


def test_a_contract_gives_the_agents_in_their_order() -> None:
    assert agents_of_lane(contract()) == (
        AgentSpec("b", "b", BOX, BOX),
        AgentSpec("a", "a", DISCRETE, DISCRETE),
    )


def test_a_contract_gives_the_ids_of_agents_that_are_no_strings() -> None:
    ids = [0, ["car", 1]]

    reported = contract(metadata={capabilities.MULTI_AGENT: {"agents": ["b", "a"], "ids": ids}})

    assert [(one.agent_id, one.key) for one in agents_of_lane(reported)] == [
        (0, "b"),
        (("car", 1), "a"),
    ]


@pytest.mark.parametrize(
    "broken",
    [
        contract(metadata={}),
        contract(metadata={capabilities.MULTI_AGENT: ["a", "b"]}),
        contract(metadata={capabilities.MULTI_AGENT: {"agents": 2}}),
        contract(metadata={capabilities.MULTI_AGENT: {"agents": ["b", "a"], "ids": [0, 0]}}),
        contract(metadata={capabilities.MULTI_AGENT: {"agents": ["b", "a"], "ids": ["b"]}}),
        contract(agents=()),
        contract(agents=("a", "b")),
        contract(agents=("b", "a", "c")),
        contract(action_space=DISCRETE),
        contract(action_space=DictSpec((("a", DISCRETE), ("b", BOX)))),
        contract(observation_space=BOX),
        contract(observation_space=DictSpec((("b", BOX), ("a", DISCRETE)))),
        contract(observation_space=lane_observation_space(DictSpec(()))),
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
    columns = AgentColumns([AgentSpec("b", "b", BOX, BOX), AgentSpec("a", "a", spec, spec)])
    space.seed(1)
    action = space.sample()

    sent = columns.actions(
        [{"a": action}, {}], np.array([[False, True], [False, False]]), NONE_IGNORED
    )

    absent = np.zeros(2, np.float32)
    whole = DictSpec((("b", BOX), ("a", spec)))
    lanes = [{"b": absent, "a": action}, {"b": absent, "a": filler(spec)}]
    for mine, expected in zip(sent, stack(whole, lanes), strict=True):
        np.testing.assert_array_equal(mine, expected)


def test_actions_of_a_lane_that_does_not_look_at_them_are_not_looked_at() -> None:
    columns = AgentColumns([AgentSpec("a", "a", DISCRETE, DISCRETE)])

    sent = columns.actions(
        [{"a": 6}, {"bus": 3}], np.array([[True], [False]]), ~np.array([1, 0], bool)
    )

    np.testing.assert_array_equal(sent[0], [6, 5])


def test_an_action_of_the_wrong_structure_names_its_agent() -> None:
    columns = AgentColumns([AgentSpec("a", "a", BOX, BOX)])

    with pytest.raises(ConformanceError, match=r"a: has shape \(3,\), expected \(2,\)"):
        columns.actions([{"a": np.zeros(3)}], np.array([[True]]), NONE_IGNORED[:1])


def test_actions_without_an_axis_lose_the_one_that_rllibs_modules_give_them() -> None:
    number = from_gymnasium(spaces.Dict(x=spaces.Box(-2.0, 2.0, (), np.float32)))
    columns = AgentColumns([AgentSpec("a", "a", BOX, number)])

    sent = columns.actions(
        [{"a": {"x": np.array([0.5], np.float32)}}], np.array([[True]]), NONE_IGNORED[:1]
    )

    np.testing.assert_array_equal(sent, [[0.5]])


def test_infos_that_belong_to_no_agent_are_common() -> None:
    columns = AgentColumns([AgentSpec("a", "a", BOX, BOX), AgentSpec("b", "b", BOX, BOX)])
    infos = {"a": {"x": 1}, "b": "odd", "__common__": {"y": 2}, "rlmesh.conformance.warning": ["z"]}

    assert columns.infos(infos) == {
        "a": {"x": 1},
        "__common__": {"y": 2, "b": "odd", "rlmesh.conformance.warning": ["z"]},
    }
    assert columns.infos({"b": {}}) == {"b": {}}


def test_ids_that_are_no_strings_are_those_of_all_that_rllib_sees() -> None:
    agents = [AgentSpec(1, "1", BOX, DISCRETE), AgentSpec(("car", 0), "car_0", BOX, DISCRETE)]
    columns = AgentColumns(agents)
    points, present = np.zeros((1, 2), np.float32), np.ones((1, 2), np.int8)
    rewards, terminated = np.array([[0.5, 0.0]]), np.array([[0, 1]], np.int8)
    observed: list[Any] = [points, points, present, rewards, terminated, 0 * present]
    goes_on = np.zeros(1, np.bool_)

    infos = [{"1": {"x": 1}, "car_0": {"y": 2}, "0": 3}]
    batch = SessionBatch(observed, np.zeros(1), goes_on, goes_on, infos)

    columns.dicts(batch, np.ones((1, 2), np.bool_), goes_on)

    assert batch.observation[0].keys() == {1, ("car", 0)}
    assert batch.rewards == [{1: 0.5, ("car", 0): 0.0}]
    assert batch.terminated == [{1: False, ("car", 0): True, "__all__": False}]
    assert batch.infos == [{1: {"x": 1}, ("car", 0): {"y": 2}, "__common__": {"0": 3}}]
    sent = columns.actions([{1: 6}], np.array([[True, False]]), NONE_IGNORED[:1])
    np.testing.assert_array_equal(sent, [[6], [5]])
    with pytest.raises(ConformanceError, match=r"1: has no action in lane 0"):
        columns.actions([{"1": 6}], np.array([[True, False]]), NONE_IGNORED[:1])


RLLIBS_OWN: dict[str, Any] = {
    "cart poles": lambda: make_multi_agent("CartPole-v1")({"num_agents": 2}),
    "two steps": lambda: TwoStepGame({}),
    "two steps with a state": lambda: TwoStepGame(
        {"one_hot_state_encoding": True, "separate_state_space": True}
    ),
    "two steps of a group": lambda: TwoStepGameWithGroupedAgents({}),
    "guess the number": lambda: GuessTheNumberGame({}),
}


@pytest.mark.parametrize("name", RLLIBS_OWN)
def test_rllibs_own_environments_are_served_as_they_are(name: str) -> None:
    lane, env = MultiAgentLane(RLLIBS_OWN[name]()), RLLIBS_OWN[name]()

    reported = contract_from_proto(contract_to_proto(describe(LaneVectorEnv([lane]), name)))
    agents = agents_of_lane(reported)

    assert [agent.agent_id for agent in agents] == (["agents"] if "group" in name else [0, 1])
    lane.action_space.seed(1)
    observation, infos = lane.reset(seed=7)
    observations, own_infos = env.reset(seed=7)
    rewards: dict[Any, Any] = {}
    ended: list[dict[Any, Any]] = [{}, {}]
    is_over = [False, False]
    while not any(is_over):
        assert observation in lane.observation_space
        present = [agent for agent in agents if agent.agent_id in observations]
        for place, agent in enumerate(agents):
            assert observation["present"][place] == (agent in present)
            assert observation["rewards"][place] == rewards.get(agent.agent_id, 0)
            assert observation["terminated"][place] == ended[0].get(agent.agent_id, False)
            assert observation["truncated"][place] == ended[1].get(agent.agent_id, False)
        for agent in present:
            given = observation["observations"][agent.key]
            np.testing.assert_equal(given, observations[agent.agent_id])
        keys = {agent.agent_id: agent.key for agent in agents}
        assert infos == {keys[agent_id]: info for agent_id, info in own_infos.items()}
        action = lane.action_space.sample()
        acting = [one for one in present if not any(flags.get(one.agent_id) for flags in ended)]
        observation, _, *is_over, infos = lane.step(action)
        observations, rewards, *ended, own_infos = env.step(
            {agent.agent_id: action[agent.key] for agent in acting}
        )
    assert is_over == [flags["__all__"] for flags in ended]
