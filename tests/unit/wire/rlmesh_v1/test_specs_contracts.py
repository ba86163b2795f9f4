from dataclasses import replace

import pytest
from gymnasium import spaces

from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.capabilities import SPEC
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.wire._pb.rlmesh.env.v1 import contract_pb2 as pb
from rlmesh_ray.wire.rlmesh_v1.specs import contract_from_proto, contract_to_proto


def contract(mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> EnvContract:
    return EnvContract(
        id="Maze-v0",
        observation_space=from_gymnasium(spaces.Box(0, 1, (2,))),
        action_space=from_gymnasium(spaces.Discrete(4)),
        num_envs=3,
        autoreset_mode=mode,
        render_mode="rgb_array",
        metadata={"render_fps": 30, "render_modes": ["rgb_array"]},
        spec={"id": "Maze-v0", "max_episode_steps": 200, "nondeterministic": False},
    )


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_contract_comes_back_equal(mode: AutoresetMode) -> None:
    data = contract_to_proto(contract(mode)).SerializeToString()

    assert contract_from_proto(pb.EnvContract.FromString(data)) == contract(mode)


@pytest.mark.parametrize("value", [None, "Maze-v0", ["Maze-v0"]])
def test_a_spec_in_another_form_is_none(value: object) -> None:
    message = contract_to_proto(replace(contract(), spec={}, metadata={SPEC: value}))
    if value is None:
        del message.metadata.entries[SPEC]  # as peers have it that do not know of the key

    assert contract_from_proto(message) == replace(contract(), spec={}, metadata={})


def test_odd_metadata_becomes_text() -> None:
    odd = EnvContract(
        id="Maze-v0",
        observation_space=from_gymnasium(spaces.Discrete(2)),
        action_space=from_gymnasium(spaces.Discrete(2)),
        num_envs=1,
        autoreset_mode=AutoresetMode.DISABLED,
        metadata={"mode": AutoresetMode.DISABLED, "size": {3}},
    )

    back = contract_from_proto(contract_to_proto(odd))

    assert back.metadata == {"mode": "AutoresetMode.DISABLED", "size": "{3}"}


def test_an_unspecified_autoreset_mode_is_disabled() -> None:
    message = contract_to_proto(contract())
    message.autoreset_mode = pb.AUTORESET_MODE_UNSPECIFIED

    assert contract_from_proto(message).autoreset_mode is AutoresetMode.DISABLED


def test_an_unknown_autoreset_mode_is_refused() -> None:
    message = contract_to_proto(contract())
    message.autoreset_mode = 9  # type: ignore[assignment]  # enums are open on the wire

    with pytest.raises(CodecError, match="autoreset mode 9"):
        contract_from_proto(message)


@pytest.mark.parametrize("name", ["observation_space", "action_space"])
def test_a_missing_space_is_named(name: str) -> None:
    message = contract_to_proto(contract())
    message.ClearField(name)

    with pytest.raises(CodecError, match=f"{name.replace('_', ' ')}: space at the root"):
        contract_from_proto(message)


def test_more_lanes_than_a_message_holds_are_refused() -> None:
    message = contract_to_proto(contract())
    message.num_envs = 2**32 - 1

    with pytest.raises(CodecError, match="4294967295 lanes of 16 bytes do not fit"):
        contract_from_proto(message)
