"""Tensors, against the published package's own helpers as the oracle."""

from typing import Any

import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from dm_env_rpc.v1 import tensor_utils
from google.protobuf import any_pb2, duration_pb2
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import (
    DataType,
    data_type_of,
    encode_tensor,
    kind_of,
    pack_tensor,
    resolved_shape,
    unpack_tensor,
)
from rlmesh_ray.errors import CodecError

NUMBERS = [kind for kind in DataType if kind not in (DataType.INVALID, DataType.STRING)][:-1]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype = draw(st.sampled_from(NUMBERS)).numpy
    return draw(hnp.arrays(dtype, draw(SHAPES)))


@given(arrays())
def test_numbers_are_packed_as_the_published_package_packs_them(array: Any) -> None:
    theirs = tensor_utils.pack_tensor(array)

    assert pack_tensor(array).SerializeToString(deterministic=True) == theirs.SerializeToString(
        deterministic=True
    )


@given(arrays())
def test_what_it_packs_is_unpacked_to_the_last_bit(array: Any) -> None:
    ours = unpack_tensor(tensor_utils.pack_tensor(array))

    assert ours.dtype == array.dtype
    assert ours.shape == array.shape
    assert ours.tobytes() == array.tobytes()


@given(st.lists(st.text(max_size=5), max_size=5))
def test_strings_keep_their_nuls(texts: list[str]) -> None:
    array = np.array([*texts, "end\0"], object)

    assert unpack_tensor(pack_tensor(array)).tolist() == array.tolist()
    assert list(pack_tensor(array).strings.array) == array.tolist()


def test_a_single_string_is_a_tensor_without_a_shape() -> None:
    assert pack_tensor("münster") == tensor_utils.pack_tensor("münster")
    assert unpack_tensor(tensor_utils.pack_tensor("münster"))[()] == "münster"


def test_messages_travel_as_any() -> None:
    wrapped = any_pb2.Any()
    wrapped.Pack(duration_pb2.Duration(seconds=3))
    array = np.empty(2, object)
    array[:] = [wrapped, wrapped]

    assert pack_tensor(array) == tensor_utils.pack_tensor(array)
    assert unpack_tensor(tensor_utils.pack_tensor(array))[1] == wrapped


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "uint64"])
def test_integers_at_every_border_of_a_varint_survive(dtype: str) -> None:
    info = np.iinfo(dtype)
    borders = [1 << bits for bits in range(info.bits)]
    wanted = [n + d for n in borders for d in (-1, 0, 1)] + [info.min, info.max]
    wanted += [-n for n in wanted]
    array = np.array([n for n in wanted if info.min <= n <= info.max], dtype)

    assert unpack_tensor(pack_tensor(array)).tolist() == array.tolist()
    assert list(pb.Tensor.FromString(encode_tensor(array)).ListFields()[0][1].array) == (
        array.tolist()
    )


@pytest.mark.parametrize(
    ("shape", "count", "resolved"),
    [
        ((), 1, ()),
        ((3,), 3, (3,)),
        ((2, 2), 1, (2, 2)),
        ((-1, 3), 6, (2, 3)),
        ((-2, 3), 6, (2, 3)),
        ((3, -1), 1, (3, 1)),
        ((-1, 3), 0, (0, 3)),
        ((0, -1), 0, (0, 0)),
        ((0, 3), 0, (0, 3)),
    ],
)
def test_shapes_are_resolved(shape: tuple[int, ...], count: int, resolved: tuple[int, ...]) -> None:
    assert resolved_shape(shape, count, "x") == resolved


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ((), 0),
        ((), 2),
        ((3,), 2),
        ((-1, -1), 1),
        ((-1, -1), 4),
        ((-1, 4), 6),
        ((-1, 0), 3),
        ((1,) * 33, 1),
    ],
)
def test_shapes_that_do_not_work_out_are_refused_by_name(
    shape: tuple[int, ...], count: int
) -> None:
    with pytest.raises(CodecError, match=r"^velocity: "):
        resolved_shape(shape, count, "velocity")


def test_one_element_stands_for_many_and_takes_no_memory() -> None:
    message = pb.Tensor(floats=pb.Tensor.FloatArray(array=[2.5]), shape=[10_000, 10_000])

    array = unpack_tensor(message)

    assert array.shape == (10_000, 10_000)
    assert array[-1, -1] == 2.5
    assert array.strides == (0, 0)


def test_a_shape_beyond_every_array_is_refused() -> None:
    message = pb.Tensor(floats=pb.Tensor.FloatArray(array=[1.0]), shape=[2**31 - 1] * 3)

    with pytest.raises(CodecError, match="no array can have shape"):
        unpack_tensor(message)


def test_a_tensor_without_a_payload_is_refused() -> None:
    with pytest.raises(CodecError, match="speed: a tensor without a payload"):
        kind_of(pb.Tensor(shape=[2]), "speed")


@pytest.mark.parametrize("dtype", ["float16", "int16", "uint16", "complex64", "datetime64[s]"])
def test_dtypes_that_no_tensor_holds_are_refused(dtype: str) -> None:
    with pytest.raises(CodecError, match=r"no tensor holds"):
        data_type_of(np.zeros(2, dtype))


def test_numbers_that_are_not_packed_are_read_as_well() -> None:
    # Two chunks of FloatArray.array: one element alone, and two packed ones.
    one = b"\x0d" + np.float32(1.5).tobytes()
    two = b"\x0a\x08" + np.array([2.5, 3.5], "<f4").tobytes()
    floats = one + two
    message = pb.Tensor.FromString(b"\x0a" + bytes([len(floats)]) + floats + b"\x7a\x01\x03")

    assert unpack_tensor(message).tolist() == [1.5, 2.5, 3.5]


@pytest.mark.parametrize("kind", [DataType.FLOAT, DataType.INT64])
@pytest.mark.parametrize("unknown", [b"\x10\x05", b"\x12\x04\0\0\x80\x3f", b"\x11" + b"\xff" * 8])
def test_what_a_payload_does_not_know_is_no_element(kind: DataType, unknown: bytes) -> None:
    alone = pb.Tensor.FromString(bytes([kind << 3 | 2, len(unknown)]) + unknown)
    known = pack_tensor(np.array([5, 6], kind.numpy))
    known.MergeFrom(alone)

    with pytest.raises(CodecError, match="x: 0 elements do not make"):
        unpack_tensor(alone, "x")
    assert unpack_tensor(known, "x").tolist() == [5, 6]


def test_an_empty_tensor_of_no_possible_shape_is_refused() -> None:
    empty = pb.Tensor(floats=pb.Tensor.FloatArray(), shape=[0, *[2**31 - 1] * 3])

    with pytest.raises(CodecError, match="x: no array can have shape"):
        unpack_tensor(empty, "x")
