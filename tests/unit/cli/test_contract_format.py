import json
from typing import Any

import gymnasium.spaces as gs
import numpy as np
import pytest

from rlmesh_ray.cli.contract_format import (
    contract_facts,
    contract_json,
    next_commands,
    space_json,
    training_fact,
)
from rlmesh_ray.protocol.capabilities import MULTI_AGENT
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.multi_agent import agent_keys, describe_agents, lane_observation_space
from rlmesh_ray.spaces.spec import DictSpec, DiscreteSpec, TupleSpec

SPACES: list[gs.Space[Any]] = [
    gs.Box(-1.0, 2.0, (3, 2), np.float32),
    gs.Box(0.0, 1.0, (0,), np.float64),
    gs.Discrete(3, start=-1),
    gs.MultiBinary(4),
    gs.MultiDiscrete([2, 5]),
    gs.Text(8, min_length=2, charset="ab"),
]


@pytest.mark.parametrize("space", SPACES)
def test_a_space_is_strict_json(space: gs.Space[Any]) -> None:
    text = json.dumps(space_json(from_gymnasium(space)), allow_nan=False)

    assert json.loads(text)["type"] == type(space).__name__


def test_bounds_are_one_number_where_they_are_equal() -> None:
    low = np.array([-np.inf, 0.0], np.float32)
    space = from_gymnasium(gs.Box(low, 5.0, (2,), np.float32))

    described = space_json(space)

    assert described["low"] == [None, 0.0]
    assert described["high"] == 5.0


def test_nested_spaces_keep_their_order() -> None:
    spec = DictSpec((("z", DiscreteSpec(2)), ("a", TupleSpec((DiscreteSpec(3),)))))

    described: Any = space_json(spec)

    assert list(described["spaces"]) == ["z", "a"]
    assert described["spaces"]["a"]["spaces"][0]["n"] == 3


def test_a_contract_has_rows_and_json() -> None:
    contract = EnvContract(
        "CartPole-v1",
        from_gymnasium(gs.Box(-1.0, 1.0, (4,), np.float32)),
        from_gymnasium(gs.Discrete(2)),
        8,
        AutoresetMode.NEXT_STEP,
    )

    assert contract_json(contract)["num_envs"] == 8
    assert contract_json(contract)["autoreset_mode"] == "NextStep"
    assert contract_json(contract)["render_mode"] is None
    assert contract_facts(contract)["autoreset"] == "next_step"  # as --autoreset takes it
    assert contract_facts(contract)["action"] == "Discrete 0…1"
    assert "agents" not in contract_facts(contract)
    assert next_commands(contract, "h:1") == ["inspect h:1", "train h:1"]


def test_where_ray_is_missing_another_environment_is_named_before_its_installation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    space = DiscreteSpec(2)
    contract = EnvContract("CartPole-v1", space, space, 8, AutoresetMode.NEXT_STEP)
    assert training_fact(contract, "h:1") == {}

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    assert next_commands(contract, "h:1", " --token-file t") == ["inspect h:1 --token-file t"]
    elsewhere, install = training_fact(contract, "h:1", " --token-file t")["to train"].split("\n")
    assert elsewhere == "from another environment: rlmesh-ray train h:1 --token-file t"
    assert install.startswith("(it needs ray and torch: pip install")


def test_several_agents_are_shown_with_their_spaces() -> None:
    by_agent = DictSpec((("0", DiscreteSpec(2)), ("1", DiscreteSpec(3))))
    metadata = {MULTI_AGENT: describe_agents(agent_keys((0, 1)))}
    observation = lane_observation_space(by_agent)
    mode = AutoresetMode.NEXT_STEP
    contract = EnvContract("Duel", observation, by_agent, 2, mode, metadata=metadata)

    facts = contract_facts(contract)

    assert facts["agents"] == "0, 1"
    assert facts["observation"] == facts["action"] == "0: Discrete 0…1\n1: Discrete 0…2"
    assert next_commands(contract, "h:1") == ["inspect h:1"]  # train refuses them
    assert training_fact(contract, "h:1") == {}
