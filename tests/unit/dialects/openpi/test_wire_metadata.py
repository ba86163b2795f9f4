"""The metadata of openpi servers, ours and others'."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray.dialects.openpi.wire import difference, facts_of, horizon_of, metadata, pack, unpack
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.wire.policy_v1 import PolicyFacts

CONTRACT = EnvContract(
    "arm",
    from_gymnasium(
        spaces.Dict(
            {
                "observation/state": spaces.Box(-1, 1, (2,), np.float32),
                "mode": spaces.Discrete(3),
                "dials": spaces.MultiDiscrete([2, 3]),
                "prompt": spaces.Text(10),
            }
        )
    ),
    from_gymnasium(spaces.Box(np.array([0, 1], np.float32), np.array([2, 2], np.float32))),
    1,
    AutoresetMode.DISABLED,
)


def found() -> dict[str, Any]:
    """Return the metadata of a server of ours, as a client reads it."""
    message: dict[str, Any] = unpack(
        pack(metadata(PolicyFacts("function", "", 3, horizon=8), CONTRACT))
    )
    return message


def test_it_describes_the_policy_in_plain_values() -> None:
    read = found()

    assert horizon_of(read) == 8
    assert read["observation_space"]["observation/state"] == {
        "space": "Box (2) float32 within [-1, 1]",
        "shape": [2],
        "dtype": "float32",
    }
    assert read["observation_space"]["prompt"]["dtype"] == "text"
    assert read["observation_space"]["mode"]["space"] == "Discrete 0…2"
    assert read["action_space"]["actions"]["shape"] == [2]
    facts = facts_of(read)
    assert (facts.kind, facts.version, facts.horizon) == ("function", 3, 8)
    assert "observation/state: Box (2) float32 within [-1, 1]" in facts.observation_space


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"reset_pose": [0.0], "action_horizon": "8", "policy": 3, "action_space": {"actions": 7}},
        {"action_horizon": True},
        {"observation_space": [1], "policy": {"kind": 1, "version": "x"}},
    ],
)
def test_metadata_of_other_servers_says_nothing_and_contradicts_nothing(
    other: dict[str, Any],
) -> None:
    assert horizon_of(other) == 0
    assert facts_of(other) == PolicyFacts()
    assert difference(other, CONTRACT) == ""


def test_an_environment_with_other_keys_or_shapes_does_not_fit() -> None:
    wider = from_gymnasium(spaces.Box(0, 1, (3,), np.float32))

    assert difference(found(), CONTRACT) == ""
    assert difference(found(), replace(CONTRACT, action_space=wider)) == (
        "actions of its action_space has shape [2], the environment's (3,)"
    )
    assert "has the keys ['dials', 'mode', 'observation/state', 'prompt']" in difference(
        found(), replace(CONTRACT, observation_space=wider)
    )
