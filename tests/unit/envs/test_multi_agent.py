"""Environments with several agents in the form of one lane."""

from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray.envs.env_source import build, make_source
from rlmesh_ray.envs.lane_vector_env import LaneVectorEnv
from rlmesh_ray.envs.multi_agent import MultiAgentLane, is_multi_agent
from rlmesh_ray.envs.vector_host import describe
from rlmesh_ray.errors import ConfigurationError, UnsupportedSpaceError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.spaces.contract import AutoresetMode
from rlmesh_ray.spaces.gym_conversion import from_gymnasium, to_gymnasium
from rlmesh_ray.spaces.multi_agent import filler, filler_of_leaf
from rlmesh_ray.spaces.spec import leaves
from rlmesh_ray.testing.envs import SPACES, EchoEnv

POINT = spaces.Box(2.0, 3.0, (2,), np.float32)


class Duel:
    """What RLlib's MultiAgentEnv has. Returns what the test sets."""

    possible_agents: Any = ("b", "a")
    observation_spaces: ClassVar[Any] = {"a": POINT, "b": spaces.Discrete(3, start=4)}
    action_spaces: ClassVar[Any] = {"a": spaces.Discrete(2), "b": spaces.Discrete(3)}

    def __init__(self, *steps: Any) -> None:
        self.steps = list(steps)
        self.actions: list[Any] = []
        self.seeds: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seeds.append((seed, options))
        return {"a": POINT.low}, {"a": {"fresh": True}}

    def step(self, actions: Any) -> Any:
        self.actions.append(actions)
        return self.steps.pop(0)

    def render(self) -> Any:
        return None

    def close(self) -> None:
        self.steps.clear()


class Pair(Duel):
    """What PettingZoo's ParallelEnv has."""

    metadata: ClassVar[Any] = {"name": "pair", "render_modes": ["rgb_array"]}
    render_mode = "rgb_array"

    def __init__(self, *steps: Any, agents: Any = ("a", "b")) -> None:
        super().__init__(*steps)
        self.agents = list(agents)

    def observation_space(self, agent: str) -> Any:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> Any:
        return self.action_spaces[agent]


def step_of(
    observations: Any,
    rewards: Any = None,
    terminated: Any = None,
    truncated: Any = None,
    infos: Any = None,
) -> Any:
    flags = {"__all__": False}
    return (
        observations,
        rewards or {},
        {**flags, **(terminated or {})},
        truncated or {},
        infos or {},
    )


ACTION = {"a": 1, "b": 2}


def test_agents_that_are_not_there_have_a_filler_and_are_marked() -> None:
    duel = Duel()
    lane = MultiAgentLane(duel)

    observation, infos = lane.reset(seed=3, options={"level": 1})

    assert observation in lane.observation_space
    assert observation["observations"]["b"] == 4
    np.testing.assert_array_equal(observation["present"], [0, 1])
    np.testing.assert_array_equal(observation["rewards"], [0.0, 0.0])
    assert infos == {"a": {"fresh": True}}
    assert duel.seeds == [(3, {"level": 1})]


def test_rewards_and_endings_stand_in_the_agents_order() -> None:
    lane = MultiAgentLane(
        Duel(step_of({"b": 5}, {"a": 0.5, "b": -2}, {"a": True}, {"b": True}, {"b": {"n": 1}}))
    )
    lane.reset()

    observation, reward, terminated, truncated, infos = lane.step(ACTION)

    assert observation in lane.observation_space
    assert observation["observations"]["b"] == 5
    np.testing.assert_array_equal(observation["observations"]["a"], [2.0, 2.0])
    np.testing.assert_array_equal(observation["present"], [1, 0])
    np.testing.assert_array_equal(observation["rewards"], [-2.0, 0.5])
    np.testing.assert_array_equal(observation["terminated"], [0, 1])
    np.testing.assert_array_equal(observation["truncated"], [1, 0])
    assert (reward, terminated, truncated, infos) == (-1.5, False, False, {"b": {"n": 1}})


def test_none_as_the_reward_of_an_agent_is_an_error_and_a_missing_one_is_0() -> None:
    lane = MultiAgentLane(Duel(step_of({"b": 5}, {"b": 1.0}), step_of({"b": 5}, {"b": None})))
    lane.reset()

    assert lane.step(ACTION)[0]["rewards"].tolist() == [1.0, 0.0]
    with pytest.raises(
        TypeError, match=r"^step\(\) returned None as the reward of agent 'b'; return a number$"
    ):
        lane.step(ACTION)


def test_only_those_act_who_were_observed_last_and_have_not_ended() -> None:
    duel = Duel(
        step_of({"a": POINT.low, "b": 4}),
        step_of({"a": POINT.low, "b": 4}, terminated={"a": True}),
        step_of({}),
        step_of({"b": 4}),
    )
    lane = MultiAgentLane(duel)
    lane.reset()

    for _ in range(4):
        lane.step(ACTION)

    assert duel.actions == [{"a": 1}, {"a": 1, "b": 2}, {"b": 2}, {}]


@pytest.mark.parametrize(
    ("terminated", "truncated", "ending"),
    [
        ({"__all__": True}, {}, (True, False)),
        ({"__all__": False}, {"__all__": True}, (False, True)),
        ({"__all__": False, "a": True, "b": True}, {}, (False, False)),
    ],
)
def test_the_episode_ends_when_the_environment_says_so_for_all(
    terminated: Any, truncated: Any, ending: Any
) -> None:
    lane = MultiAgentLane(Duel(({}, {}, terminated, truncated, {})))
    lane.reset()

    assert lane.step(ACTION)[2:4] == ending


@pytest.mark.parametrize(
    ("terminated", "truncated", "left", "ending"),
    [
        ({"a": False, "b": False}, {"a": False, "b": False}, ["a", "b"], (False, False)),
        ({"a": True, "b": False}, {"a": False, "b": False}, ["b"], (False, False)),
        ({"a": True, "b": True}, {"a": False, "b": False}, [], (True, False)),
        ({"b": False}, {"b": True}, [], (False, True)),
        ({"a": True, "b": False}, {"a": False, "b": True}, [], (True, False)),
        ({"a": True, "b": True}, {"a": True, "b": True}, [], (True, True)),
        # Some leave those who have ended among the agents until the next reset.
        ({"a": False, "b": False}, {"a": True, "b": True}, ["a", "b"], (False, True)),
        ({}, {}, [], (True, False)),
    ],
)
def test_a_parallel_episode_ends_with_its_last_agent(
    terminated: Any, truncated: Any, left: Any, ending: Any
) -> None:
    lane = MultiAgentLane(Pair(({}, {}, terminated, truncated, {}), agents=left))
    lane.reset()

    assert lane.step(ACTION)[2:4] == ending


def test_the_contract_names_the_agents() -> None:
    vector = build(make_source(Pair, 3))

    contract = describe(vector, "pair")

    assert isinstance(vector, LaneVectorEnv)
    assert contract.autoreset_mode is AutoresetMode.NEXT_STEP
    assert contract.render_mode == "rgb_array"
    assert contract.metadata["name"] == "pair"
    assert contract.metadata[capabilities.MULTI_AGENT] == {"agents": ["b", "a"]}


class Registered(gymnasium.Env[Any, Any]):
    """As RLlib's MultiAgentEnv is, a gymnasium Env without spaces of its own."""

    observation_space = None  # type: ignore[assignment]
    action_space = None  # type: ignore[assignment]
    possible_agents: Any = ("b", "a")

    def get_observation_space(self, agent: str) -> Any:
        return Duel.observation_spaces[agent]

    def get_action_space(self, agent: str) -> Any:
        return Duel.action_spaces[agent]

    def reset(self, **_kwargs: Any) -> Any:
        return {"b": 4}, {}


def test_a_wrapped_environment_is_seen_through_its_wrappers() -> None:
    wrapped = gymnasium.wrappers.OrderEnforcing(Registered())

    lane = MultiAgentLane(wrapped)

    assert is_multi_agent(wrapped)
    np.testing.assert_array_equal(lane.reset()[0]["present"], [1, 0])


@pytest.mark.parametrize("env", [Duel(), Pair(), gymnasium.wrappers.OrderEnforcing(Registered())])
def test_calls_reach_the_environment_itself(env: Any) -> None:
    vector = LaneVectorEnv([MultiAgentLane(env)])

    assert vector.call_lanes("possible_agents", [], [0]) == [("b", "a")]


@pytest.mark.parametrize("env", [Duel(), Pair(), Registered()])
def test_an_instance_is_hosted_like_any_other(env: Any) -> None:
    source = make_source(env)

    vector = build(source)

    assert source.max_sessions == 1
    assert vector.single_action_space == spaces.Dict(Duel.action_spaces)


class Inspected(EchoEnv):
    """One agent, whose environment has names that those of several agents have, too."""

    observation_spaces: ClassVar[Any] = {"part": POINT}

    def get_observation_space(self) -> Any:
        return self.observation_space


def test_environments_of_one_agent_are_left_alone() -> None:
    assert not is_multi_agent(EchoEnv(SPACES["box"]))
    assert not is_multi_agent(Inspected(SPACES["box"]))
    assert not is_multi_agent(Pair)


NAMES = {"0": 0, "car_1": ("car", 1), "0_": "0_"}
"""Ids of three agents, by their keys."""


class Named:
    """Its agents are named by an integer, a tuple and a string. Lists them nowhere but there."""

    observation_spaces: ClassVar[Any] = {
        agent: spaces.Discrete(2 + number) for number, agent in enumerate(NAMES.values())
    }
    action_spaces: ClassVar[Any] = dict.fromkeys(NAMES.values(), spaces.Discrete(4))

    def __init__(self) -> None:
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {("car", 1): 2, "0_": 3}, {("car", 1): {"fresh": True}, "__common__": {"n": 1}}

    def step(self, actions: Any) -> Any:
        self.actions.append(actions)
        flags = {"__all__": False, 0: True}
        return {0: 1, ("car", 1): 0}, {"0_": 2.0, 0: 1.0}, flags, {("car", 1): True}, {0: {"x": 1}}

    def close(self) -> None:
        pass


def test_agents_of_any_name_have_their_keys_in_spaces_values_and_infos() -> None:
    env: Any = Named()
    lane = MultiAgentLane(env)
    action = {"0": 1, "car_1": 2, "0_": 3}

    first, first_infos = lane.reset()
    observation, reward, _, _, infos = lane.step(action)
    lane.step(action)

    assert first in lane.observation_space
    assert observation in lane.observation_space
    np.testing.assert_array_equal(first["present"], [0, 1, 1])
    assert first_infos == {"car_1": {"fresh": True}, "__common__": {"n": 1}}
    assert observation["observations"] == {"0": 1, "car_1": 0, "0_": 0}
    np.testing.assert_array_equal(observation["present"], [1, 1, 0])
    np.testing.assert_array_equal(observation["rewards"], [1.0, 0.0, 2.0])
    np.testing.assert_array_equal(observation["terminated"], [1, 0, 0])
    np.testing.assert_array_equal(observation["truncated"], [0, 1, 0])
    assert (reward, infos) == (3.0, {"0": {"x": 1}})
    # The environment sees nothing of the keys; agents that have ended do not act.
    assert env.actions == [{("car", 1): 2, "0_": 3}, {}]
    assert lane.metadata[capabilities.MULTI_AGENT] == {
        "agents": ["0", "car_1", "0_"],
        "ids": [0, ["car", 1], "0_"],
    }


class Spaced(Registered):
    """As Registered, whose spaces are Dicts by agent, and which lists no agents."""

    observation_space = spaces.Dict(Duel.observation_spaces)  # type: ignore[assignment]
    action_space = spaces.Dict(Duel.action_spaces)  # type: ignore[assignment]
    possible_agents: Any = ()


class Featured(Spaced):
    """Only its observations are a Dict: that of one agent's features."""

    action_space: Any = spaces.Discrete(2)


class Grouped(Registered):
    """Lists its agents as RLlib's older environments do."""

    possible_agents: Any = ()

    def get_agent_ids(self) -> Any:
        return {"b", "a"}


@pytest.mark.parametrize("env", [Spaced(), Grouped(), gymnasium.wrappers.OrderEnforcing(Spaced())])
def test_agents_that_are_not_listed_are_learned_from_the_spaces_or_asked_for(env: Any) -> None:
    lane: Any = MultiAgentLane(env)

    assert is_multi_agent(env)
    assert list(lane.action_space.keys()) == ["a", "b"]


def test_one_environment_for_several_lanes_is_refused() -> None:
    shared = Duel()
    source = make_source(lambda: shared, 2)

    with pytest.raises(ConfigurationError, match="same environment for several lanes"):
        build(source)


@pytest.mark.parametrize("name", SPACES)
def test_a_filler_lies_in_its_space(name: str) -> None:
    space = SPACES[name]

    spec = from_gymnasium(space)

    assert space.contains(filler(spec))
    for leaf in leaves(spec):
        assert np.asarray(filler_of_leaf(leaf)).dtype == leaf.dtype or leaf.dtype is None


def test_a_filler_keeps_away_from_zero_where_zero_is_outside() -> None:
    space = spaces.Box(np.array([-3, 2]), np.array([-1, 5]), dtype=np.int8)

    np.testing.assert_array_equal(filler(from_gymnasium(space)), [-1, 2])


def test_spaces_keep_the_order_of_the_agents() -> None:
    lane = MultiAgentLane(Duel())

    observations: Any = to_gymnasium(from_gymnasium(lane.observation_space))
    actions: Any = to_gymnasium(from_gymnasium(lane.action_space))

    for space in (observations["observations"], actions):
        assert list(space.keys()) == ["b", "a"]


class TurnBased(Pair):
    def agent_iter(self) -> Any:
        return iter(self.agents)


class Alone(Pair):
    possible_agents: Any = ()
    observation_spaces: ClassVar[Any] = None


class Unlisted(Alone):
    """Like PettingZoo's environments that generate agents."""

    @property
    def possible_agents(self) -> Any:
        raise AttributeError("possible_agents")


class Measured(Duel):
    possible_agents: Any = (0.5, "a")


class Twice(Duel):
    possible_agents: Any = ("a", "a")


class Forgetful(Duel):
    action_spaces: ClassVar[Any] = {"a": spaces.Discrete(2)}


class Reader(Duel):
    observation_spaces: ClassVar[Any] = {
        **Duel.observation_spaces,
        "a": spaces.Graph(POINT, None),
    }


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (TurnBased, r"AEC .* parallel_env\(\)"),
        (Alone, "no possible_agents, .*; set possible_agents to a list"),
        (Unlisted, "no possible_agents, .*; set possible_agents to a list"),
        (Featured, "no possible_agents, .*; set possible_agents to a list"),
        (Measured, "agent 0.5; agent ids are strings, integers"),
        (Twice, "lists an agent twice"),
        (Forgetful, "no action space for agent 'b' .* set action_spaces"),
        (Reader, "agent 'a', observation: .*Graph.* supported are .* such as a Box"),
    ],
)
def test_what_cannot_be_hosted_is_refused_with_the_remedy(kind: Any, message: str) -> None:
    source = make_source(kind)

    with pytest.raises(ConfigurationError, match=message):
        build(source)


def test_a_space_that_has_no_place_in_a_contract_keeps_its_own_error() -> None:
    with pytest.raises(UnsupportedSpaceError):
        MultiAgentLane(Reader())


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (({"c": 1}, {}, {"__all__": False}, {}, {}), "agents \\[\"'c'\"\\].*list all that may"),
        (({}, {"c": 1}, {"__all__": False}, {}, {}), "possible_agents"),
        (({}, {}, {}, {}, {}), "have no '__all__'"),
        (([1], {}, {}, {}, {}), "returned list where a dict by agent"),
    ],
)
def test_results_that_make_no_sense_are_refused_with_the_remedy(result: Any, message: str) -> None:
    lane = MultiAgentLane(Duel(result))
    lane.reset()

    with pytest.raises(ConfigurationError, match=message):
        lane.step(ACTION)
