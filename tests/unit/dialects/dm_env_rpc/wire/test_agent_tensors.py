"""What agents send and get, against the published package as the oracle."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from dm_env_rpc.v1 import tensor_utils
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.dialects.dm_env_rpc.protocol import SequenceState
from rlmesh_ray.dialects.dm_env_rpc.wire.agent_tensors import (
    LaneFrame,
    agent_names,
    all_lanes,
    lane_agent,
)
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import TensorSpec
from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.spaces.batch import Column, leaves
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import Space, from_gymnasium
from rlmesh_ray.testing.strategies import batches, gymnasium_spaces

NUM_LANES = 2


def contract_of(space: Space) -> EnvContract:
    spec = from_gymnasium(space)
    return EnvContract("x", spec, spec, NUM_LANES, AutoresetMode.NEXT_STEP)


def frame_of(columns: list[Column]) -> LaneFrame:
    no = np.zeros(NUM_LANES, bool)
    return LaneFrame(columns, np.array([0.1, 0.2]), no, ~no)


def within(spec: TensorSpec, column: Column) -> Column:
    """Return ``column`` with what is NaN or out of its bounds moved into them."""
    if isinstance(column, tuple) or column.dtype.kind == "b":
        return column
    moved = np.where(np.isnan(column), 0, column) if column.dtype.kind == "f" else column
    if spec.low is not None:
        moved = np.maximum(moved, spec.low)
    if spec.high is not None:
        moved = np.minimum(moved, spec.high)
    return np.asarray(moved, column.dtype)


def observed(data: bytes) -> tuple[int, list[Any]]:
    step = pb.EnvironmentResponse.FromString(data).step
    uids = sorted(step.observations)
    return step.state, [tensor_utils.unpack_tensor(step.observations[uid]) for uid in uids]


def texts(value: Any) -> Any:
    """NumPy's text loses NULs at the end, in the oracle."""
    if isinstance(value, (str, np.str_)):
        return str(value).rstrip("\0")
    return [text.rstrip("\0") for text in value]


def assert_same_bits(found: Any, expected: Any) -> None:
    """Compare to the last bit; but NaN of 16 bits, which travels in 32, may become a quiet one."""
    if expected.dtype == np.float16:
        found, expected = (np.where(np.isnan(each), np.nan, each) for each in (found, expected))
    assert found.tobytes() == expected.tobytes()


@given(gymnasium_spaces(), st.data())
def test_observations_arrive_to_the_last_bit(space: Space, data: st.DataObject) -> None:
    contract = contract_of(space)
    frame = frame_of(data.draw(batches(contract.observation_space, NUM_LANES)))
    own_leaves = leaves(contract.observation_space)
    uids = range(1, len(own_leaves) + 2)

    for lane in range(NUM_LANES):
        response = lane_agent(contract, lane).pack_step(
            SequenceState.RUNNING, uids, frame, is_acted=True
        )
        state, values = observed(response)
        assert state == 1
        assert values.pop() == frame.rewards[lane]
        for leaf, column, value in zip(own_leaves, frame.columns, values, strict=True):
            if leaf.dtype is None:
                assert texts(value) == texts(column[lane])
            else:
                expected = np.asarray(column[lane])
                assert_same_bits(np.asarray(value, leaf.dtype), expected)
                assert np.shape(value) == leaf.shape


@given(gymnasium_spaces(), st.data())
def test_batches_arrive_to_the_last_bit(space: Space, data: st.DataObject) -> None:
    contract = contract_of(space)
    frame = frame_of(data.draw(batches(contract.observation_space, NUM_LANES)))
    own_leaves = leaves(contract.observation_space)

    response = all_lanes(contract).pack_step(
        SequenceState.RUNNING, range(1, len(own_leaves) + 4), frame, is_acted=False
    )

    *values, rewards, terminated, truncated = observed(response)[1]
    assert rewards.tolist() == [0.0, 0.0]
    assert terminated.tolist() == [False, False]
    assert truncated.tolist() == [True, True]
    for leaf, column, value in zip(own_leaves, frame.columns, values, strict=True):
        if leaf.dtype is None:
            assert texts(value) == texts(column)
        else:
            assert_same_bits(np.asarray(value, leaf.dtype), np.asarray(column))


@given(gymnasium_spaces(), st.data())
def test_actions_arrive_to_the_last_bit(space: Space, data: st.DataObject) -> None:
    contract = contract_of(space)
    own_leaves = leaves(contract.action_space)
    tensors = lane_agent(contract, 0)
    drawn = data.draw(batches(contract.action_space, 1))
    columns = [
        within(action.spec, column) for action, column in zip(tensors.actions, drawn, strict=True)
    ]
    specs = tensors.specs.actions
    sent = {}
    for uid, leaf, column in zip(sorted(specs), own_leaves, columns, strict=True):
        kind = specs[uid].dtype if leaf.dtype is not None else None
        sent[uid] = tensor_utils.pack_tensor(column[0], dtype=kind)

    values = tensors.read_actions(sent)

    for position, leaf in enumerate(own_leaves):
        if leaf.dtype is None:
            assert texts(values[position]) == texts(columns[position][0])
        else:
            # As the shell takes them: into a column.
            taken = np.zeros((1, *leaf.shape), leaf.dtype)
            taken[0] = values[position]
            assert taken.tobytes() == np.asarray(columns[position]).tobytes()


@pytest.mark.parametrize("value", [-129, 128, 300])
def test_a_single_integer_out_of_its_bounds_is_refused(value: int) -> None:
    tensors = lane_agent(contract_of(spaces.Box(-128, 127, (), np.int16)), 0)

    with pytest.raises(CodecError, match="action 'action'"):
        tensors.read_actions({1: tensor_utils.pack_tensor(value, dtype=np.int32)})


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_single_nan_is_refused_and_infinity_is_not(dtype: type) -> None:
    tensors = lane_agent(contract_of(spaces.Box(-np.inf, np.inf, (), dtype)), 0)
    wire = np.float64 if dtype is np.float64 else np.float32

    with pytest.raises(CodecError, match="holds NaN"):
        tensors.read_actions({1: tensor_utils.pack_tensor(np.nan, dtype=wire)})
    assert tensors.read_actions({1: tensor_utils.pack_tensor(np.inf, dtype=wire)}) == {0: np.inf}


def test_unknown_uids_are_named() -> None:
    tensors = lane_agent(contract_of(spaces.Discrete(2)), 0)

    with pytest.raises(CodecError, match="no action 7; there are 1"):
        tensors.read_actions({7: tensor_utils.pack_tensor(1)})
    with pytest.raises(CodecError, match="no observation 9; there are 1, 2"):
        tensors.check_requested([1, 9])


@pytest.mark.parametrize("claim", [None, 3, {}, {"agents": 1}, {"agents": [["a"]]}])
def test_metadata_that_claim_no_agents_name_none(claim: Any) -> None:
    contract = contract_of(spaces.Discrete(2))
    metadata = {capabilities.MULTI_AGENT: claim}

    assert agent_names(replace(contract, metadata=metadata)) == ()


def test_agents_without_the_spaces_of_such_are_none() -> None:
    metadata = {capabilities.MULTI_AGENT: {"agents": ["a", "b"]}}

    assert agent_names(replace(contract_of(spaces.Discrete(2)), metadata=metadata)) == ()
