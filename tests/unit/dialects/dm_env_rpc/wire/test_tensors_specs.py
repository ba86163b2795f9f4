"""Specs of tensors, and how spaces become them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from dm_env_rpc.v1 import dm_env_utils, tensor_spec_utils
from gymnasium import spaces
from hypothesis import given

from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import (
    AgentSpecs,
    DataType,
    TensorSpec,
    contract_from_text,
    contract_to_text,
    spec_from_proto,
    spec_to_proto,
    specs_from_proto,
    specs_to_proto,
    tensor_name,
    tensor_spec,
)
from rlmesh_ray.errors import CodecError
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import Space, from_gymnasium
from rlmesh_ray.spaces.spec import SpaceSpec, leaves
from rlmesh_ray.testing.strategies import gymnasium_spaces


def tensor_specs(space: SpaceSpec, root: str, num_lanes: int | None = None) -> list[TensorSpec]:
    return [tensor_spec(leaf, tensor_name(leaf.path, root), num_lanes) for leaf in leaves(space)]


def specs_of(space: Space) -> list[TensorSpec]:
    return tensor_specs(from_gymnasium(space), "observation")


@given(gymnasium_spaces())
def test_every_spec_of_a_space_is_one_that_the_published_package_reads(space: Space) -> None:
    for spec in specs_of(space):
        message = spec_to_proto(spec)
        dm_env_utils.tensor_spec_to_dm_env_spec(message)
        again = spec_from_proto(message)
        assert spec_to_proto(again) == message
        if spec.low is not None and spec.high is not None:
            bounds = tensor_spec_utils.bounds(message)
            np.testing.assert_array_equal(bounds.min, spec.low)
            np.testing.assert_array_equal(bounds.max, spec.high)


@given(gymnasium_spaces())
def test_the_names_of_a_space_are_unique(space: Space) -> None:
    names = [spec.name for spec in specs_of(space)]

    assert len(set(names)) == len(names)


@given(gymnasium_spaces())
def test_the_contract_comes_back_exactly(space: Space) -> None:
    spec = from_gymnasium(space)
    contract = EnvContract("x", spec, spec, 3, AutoresetMode.NEXT_STEP, "rgb_array", {"a": [1]})

    assert contract_from_text(contract_to_text(contract)) == contract


@pytest.mark.parametrize("text", ["", "[]", "{", '{"numEnvs": -1}', '{"autoresetMode": 77}'])
def test_text_that_is_no_contract_is_refused(text: str) -> None:
    with pytest.raises(CodecError):
        contract_from_text(text)


def test_nested_names_have_dots_and_keys_are_escaped() -> None:
    space = spaces.Dict(
        {
            "arm": spaces.Tuple((spaces.Discrete(2), spaces.Dict({"a.b": spaces.Discrete(2)}))),
            "reward": spaces.Discrete(2),
            "50%": spaces.Dict({"reward": spaces.Discrete(2), "": spaces.Discrete(2)}),
        }
    )

    names = {spec.name for spec in specs_of(space)}

    assert names == {"arm.0", "arm.1.a%2Eb", "%72eward", "50%25.reward", "50%25.%"}


@pytest.mark.parametrize(
    ("space", "kind", "low", "high"),
    [
        (spaces.Discrete(5, start=-2), DataType.INT64, -2, 2),
        (spaces.MultiBinary(3), DataType.INT8, 0, 1),
        (spaces.MultiDiscrete([2, 3]), DataType.INT64, 0, [1, 2]),
        (spaces.Box(-1, 1, (2,), np.float16), DataType.FLOAT, -1, 1),
        (spaces.Box(-1, 1, (2,), np.int16), DataType.INT32, -1, 1),
        (spaces.Box(0, 255, (2,), np.uint8), DataType.UINT8, 0, 255),
        (spaces.Box(0, 255, (), np.uint8), DataType.UINT8, 0, None),
        (
            spaces.Box(0, 1, (2,), np.bool_),  # type: ignore[arg-type]
            DataType.BOOL,
            None,
            None,
        ),
        (spaces.Box(-np.inf, 5, (2,), np.float64), DataType.DOUBLE, None, 5),
        (spaces.Text(4), DataType.STRING, None, None),
    ],
)
def test_bounds_and_dtypes_of_spaces(space: Space, kind: DataType, low: Any, high: Any) -> None:
    (spec,) = specs_of(space)

    assert spec.name == "observation"
    assert spec.dtype is kind
    assert (None if spec.low is None else spec.low.tolist()) == low
    assert (None if spec.high is None else spec.high.tolist()) == high


def test_a_batched_spec_has_an_axis_of_lanes() -> None:
    space = from_gymnasium(spaces.Box(np.array([0, -1]), np.array([1, 1]), dtype=np.int32))

    (spec,) = tensor_specs(space, "action", 3)

    assert spec.shape == (3, 2)
    assert spec.low is not None
    assert spec.low.tolist() == [[0, -1]] * 3
    assert spec.high is not None
    assert spec.high.shape == ()


@pytest.mark.parametrize(
    ("kind", "field", "low"),
    [
        (DataType.FLOAT, b"\x0d" + np.float32(-1.5).tobytes(), -1.5),
        (DataType.DOUBLE, b"\x11" + np.float64(-1.5).tobytes(), -1.5),
        (DataType.INT32, b"\x18" + b"\xff" * 9 + b"\x01", -1),
        (DataType.INT64, b"\x20\x05", 5),
        (DataType.UINT32, b"\x28\x05", 5),
        (DataType.UINT64, b"\x30" + b"\xff" * 9 + b"\x01", 2**64 - 1),
        (DataType.INT8, b"\x3a\x01\xfe", -2),
        (DataType.UINT8, b"\x40\x07", 7),
    ],
)
def test_bounds_of_old_servers_are_read(kind: DataType, field: bytes, low: Any) -> None:
    message = pb.TensorSpec(name="x", dtype=int(kind), shape=[2])
    message.min.MergeFromString(field)

    spec = spec_from_proto(message)

    assert spec.low is not None
    assert spec.low.tolist() == low
    assert spec.high is None


def _twice(message: Any) -> None:
    message.actions[1].name = message.actions[2].name = "x"
    message.actions[1].dtype = message.actions[2].dtype = pb.DataType.FLOAT


def _crossed(message: Any) -> None:
    message.actions[1].dtype = pb.DataType.FLOAT
    tensor_spec_utils.set_bounds(message.actions[1], None, 1.0)
    message.actions[1].min.floats.array.append(2.0)


def _two_variable_axes(message: Any) -> None:
    message.actions[1].dtype = pb.DataType.FLOAT
    message.actions[1].shape[:] = [-1, -1]


def _other_bounds(message: Any) -> None:
    message.actions[1].dtype = pb.DataType.FLOAT
    message.actions[1].min.doubles.array.append(2.0)


def _odd_number_of_bounds(message: Any) -> None:
    message.actions[1].dtype = pb.DataType.FLOAT
    message.actions[1].shape[:] = [3]
    message.actions[1].min.floats.array.extend([2.0, 3.0])


def _unknown_dtype(message: Any) -> None:
    message.actions[1].dtype = 77


@pytest.mark.parametrize(
    "spoil",
    [_twice, _crossed, _two_variable_axes, _other_bounds, _odd_number_of_bounds, _unknown_dtype],
)
def test_specs_that_contradict_themselves_are_refused(spoil: Callable[[Any], None]) -> None:
    message = pb.ActionObservationSpecs()
    spoil(message)

    with pytest.raises(CodecError):
        specs_from_proto(message)


def test_specs_are_read_as_they_were_written() -> None:
    specs = AgentSpecs(
        {2**64 - 1: TensorSpec("a", DataType.INT8)},
        {0: TensorSpec("b", DataType.STRING, (-1,)), 1: TensorSpec("c", DataType.PROTO)},
    )

    message = specs_to_proto(specs)

    assert specs_to_proto(specs_from_proto(message)) == message
    assert list(specs_from_proto(message).actions) == [2**64 - 1]
