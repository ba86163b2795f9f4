"""After any bytes of a dm_env_rpc server our client fails with errors of its own only."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from dm_env_rpc.v1 import tensor_spec_utils, tensor_utils
from dm_env_rpc.v1.extensions import properties_pb2
from google.rpc import error_details_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmesh_ray.dialects.dm_env_rpc.client import frames
from rlmesh_ray.dialects.dm_env_rpc.client.lane_steps import LaneAgent, cast
from rlmesh_ray.dialects.dm_env_rpc.client.settings import DmEnvRpcSettings
from rlmesh_ray.dialects.dm_env_rpc.client.tensor_space import WorldContract, contract_of_world
from rlmesh_ray.dialects.dm_env_rpc.client.world_join import JoiningAgent
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import (
    contract_from_text,
    contract_to_text,
    specs_from_proto,
    unpack_tensor,
)
from rlmesh_ray.errors import RemoteProtocolError, RlmeshError
from rlmesh_ray.spaces.batch import empty_columns
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium, to_gymnasium
from rlmesh_ray.testing.strategies import damaged


def spec(name: str, dtype: Any, shape: tuple[int, ...], low: Any = None, high: Any = None) -> Any:
    kind = tensor_utils.np_type_to_data_type(np.dtype(dtype))
    made = pb.TensorSpec(name=name, shape=shape, dtype=kind)
    if low is not None:
        tensor_spec_utils.set_bounds(made, np.asarray(low, dtype), np.asarray(high, dtype))
    return made


def joined() -> bytes:
    response = pb.EnvironmentResponse()
    specs = response.join_world.specs
    specs.actions[1].CopyFrom(spec("move", np.int8, (), -1, 1))
    specs.actions[2].CopyFrom(spec("turn", np.int32, (2,), [0, 0], [3, 4]))
    specs.observations[3].CopyFrom(spec("eye.left", np.float32, (2,), -1, 1))
    specs.observations[4].CopyFrom(spec("eye.words", str, ()))
    specs.observations[5].CopyFrom(spec("reward", np.float64, ()))
    data: bytes = response.SerializeToString()
    return data


def stepped() -> bytes:
    response = pb.EnvironmentResponse()
    response.step.state = 1
    values = {3: np.ones(2, np.float32), 4: "so", 5: np.float64(2)}
    for uid, value in values.items():
        response.step.observations[uid].CopyFrom(tensor_utils.pack_tensor(value))
    data: bytes = response.SerializeToString()
    return data


STREAM: Any = object()
"""Nothing is sent."""


def world(frame: bytes) -> tuple[WorldContract, LaneAgent]:
    own = DmEnvRpcSettings()
    specs = specs_from_proto(frames.parse_answer(frame).join_world.specs)
    made = contract_of_world(specs, None, own, "here")
    return made, LaneAgent(JoiningAgent(0, STREAM), specs, made[1], made[2], own, "here")


def read(frame: bytes, made: WorldContract, agent: LaneAgent) -> tuple[list[Any], float]:
    columns = empty_columns(made[0].observation_space, 1)
    rows = [list(column) if isinstance(column, tuple) else column for column in columns]
    agent.answer = frames.parse_answer(frame).step
    agent.show(rows)
    return rows, agent.outcome()[0]


def test_what_is_whole_is_read() -> None:
    made, agent = world(joined())
    read(stepped(), made, agent)  # which begins a sequence, and has no reward

    rows, reward = read(stepped(), made, agent)

    assert [np.asarray(row).tolist() for row in rows] == [[[1.0, 1.0]], ["so"]]
    assert reward == 2.0


@settings(max_examples=150)
@given(st.data())
def test_damaged_specs_raise_our_errors(data: st.DataObject) -> None:
    frame = data.draw(damaged(joined()))

    try:
        if frames.parse_answer(frame).HasField("join_world"):
            made, _ = world(frame)
            to_gymnasium(made[0].action_space)
            to_gymnasium(made[0].observation_space)
    except RlmeshError:
        pass


MADE = world(joined())


@settings(max_examples=150)
@given(st.data())
def test_damaged_steps_raise_our_errors(data: st.DataObject) -> None:
    frame = data.draw(damaged(stepped()))

    try:
        if frames.parse_answer(frame).HasField("step"):
            read(frame, *MADE)
    except RlmeshError:
        pass


def published() -> bytes:
    space = from_gymnasium(gymnasium.spaces.Discrete(2))
    contract = EnvContract("Own-v0", space, space, 2, AutoresetMode.NEXT_STEP)
    answer = properties_pb2.PropertyResponse()
    text = tensor_utils.pack_tensor(contract_to_text(contract))
    answer.read_property.value.CopyFrom(text)
    response = pb.EnvironmentResponse()
    response.extension.Pack(answer)
    data: bytes = response.SerializeToString()
    return data


def refused() -> bytes:
    response = pb.EnvironmentResponse()
    response.error.code, response.error.message = 13, "it broke"
    response.error.details.add().Pack(error_details_pb2.DebugInfo(detail="there"))
    data: bytes = response.SerializeToString()
    return data


def test_a_contract_that_is_whole_is_read() -> None:
    value = frames.read_value(frames.parse_answer(published()))

    assert contract_from_text(str(unpack_tensor(value)[()])).num_envs == 2


@settings(max_examples=150)
@given(st.data())
def test_damaged_contracts_and_refusals_raise_our_errors(data: st.DataObject) -> None:
    frame = data.draw(damaged(data.draw(st.sampled_from([published(), refused()]))))

    try:
        answer = frames.parse_answer(frame)
        if answer.HasField("extension"):
            contract_from_text(str(unpack_tensor(frames.read_value(answer))[()]))
    except RlmeshError:
        pass


def test_a_frame_of_nothing_is_refused() -> None:
    with pytest.raises(RlmeshError):
        frames.parse_answer(b"")


def test_an_integer_beyond_the_dtype_of_its_leaf_is_refused() -> None:
    assert cast(np.array([300, -2]), np.dtype(np.int16), "x").tolist() == [300, -2]
    assert cast(np.array([1e300, 1.5]), np.dtype(np.float32), "x").tolist() == [np.inf, 1.5]

    with pytest.raises(RemoteProtocolError, match="observation 'x' has an integer beyond int16"):
        cast(np.array([70_000]), np.dtype(np.int16), "x")
    with pytest.raises(RemoteProtocolError, match="beyond uint8"):
        cast(np.array([-1]), np.dtype(np.uint8), "x")
