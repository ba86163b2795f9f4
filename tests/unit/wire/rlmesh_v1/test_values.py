from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.errors import CodecError
from rlmesh_ray.spaces.batch import Column, leaves, stack
from rlmesh_ray.spaces.gym_conversion import Space, from_gymnasium
from rlmesh_ray.testing.equality import assert_identical
from rlmesh_ray.testing.strategies import batches, damaged, specs
from rlmesh_ray.wire._pb.rlmesh.spaces.v1 import value_pb2 as pb
from rlmesh_ray.wire.rlmesh_v1.values import decode_batch, encode_batch

DICT = from_gymnasium(
    spaces.Dict([("n", spaces.Discrete(9, dtype=np.uint8)), ("b", spaces.MultiBinary(2))])
)
TUPLE = from_gymnasium(spaces.Tuple([spaces.Box(0, 1, (2,), np.float16), spaces.Text(4)]))
TEXT = from_gymnasium(spaces.Text(4))


@pytest.mark.parametrize("num_lanes", [1, 3])
@given(data=st.data())
def test_a_batch_comes_back_to_the_bit(data: st.DataObject, num_lanes: int) -> None:
    spec = data.draw(specs())
    columns = data.draw(batches(spec, num_lanes))

    back = decode_batch(spec, encode_batch(spec, columns, num_lanes), num_lanes)

    assert_identical(back, columns)


@given(data=st.data())
def test_a_damaged_batch_is_refused_or_has_the_declared_form(data: st.DataObject) -> None:
    spec = data.draw(specs())
    frame = encode_batch(spec, data.draw(batches(spec, 2)), 2)

    try:
        columns = decode_batch(spec, data.draw(damaged(frame)), 2)
    except CodecError:
        return

    # Encoding refuses columns of any other form.
    encode_batch(spec, columns, 2)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (2, 2)),
        spaces.Discrete(9),
        spaces.Discrete(9, dtype=np.uint16),
        spaces.MultiBinary(3),
        spaces.MultiDiscrete([3, 4]),
    ],
)
def test_arrays_travel_raw_lane_after_lane(space: Space) -> None:
    spec = from_gymnasium(space)
    space.seed(3)
    values = [space.sample() for _ in range(3)]

    data = encode_batch(spec, stack(spec, values), 3)

    assert data == b"".join(np.asarray(value).tobytes() for value in values)


def test_a_raw_batch_is_decoded_without_a_copy() -> None:
    data = bytes(16)

    (column,) = decode_batch(from_gymnasium(spaces.Box(0, 1, (2,))), data, 2)

    assert isinstance(column, np.ndarray)
    assert np.shares_memory(column, np.frombuffer(data, np.uint8))


def test_a_column_that_is_not_contiguous_is_encoded_in_order() -> None:
    spec = from_gymnasium(spaces.Box(0, 9, (2,), np.uint8))

    assert encode_batch(spec, [np.array([[1, 3], [2, 4]], np.uint8).T], 2) == b"\x01\x02\x03\x04"


def test_a_dict_travels_as_one_node_a_lane() -> None:
    columns: list[Column] = [np.array([7, 8], np.uint8), np.array([[0, 1], [1, 1]], np.int8)]

    batch = pb.ValueList.FromString(encode_batch(DICT, columns, 2))

    assert [node.dict.entries["n"].discrete for node in batch.items] == [7, 8]
    assert [node.dict.entries["b"].multi for node in batch.items] == [b"\x00\x01", b"\x01\x01"]


def test_a_tuple_travels_as_one_node_a_lane() -> None:
    columns: list[Column] = [np.array([[1, 2]], np.float16), ("ab",)]

    batch = pb.ValueList.FromString(encode_batch(TUPLE, columns, 1))

    box, text = batch.items[0].tuple.items
    assert box.tensor == np.array([1, 2], "<f2").tobytes()
    assert text.text == "ab"


def test_texts_travel_as_one_node_a_lane() -> None:
    batch = pb.ValueList.FromString(encode_batch(TEXT, [("ab", "")], 2))

    assert [node.WhichOneof("kind") for node in batch.items] == ["text", "text"]


def test_bools_that_are_neither_0_nor_1_are_set() -> None:
    flag: Any = np.bool_
    (column,) = decode_batch(from_gymnasium(spaces.Box(0, 1, (3,), flag)), b"\x00\x01\x02", 1)

    assert_identical(column, np.array([[False, True, True]]))


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ([np.zeros(2, np.uint8)], "1 columns for 2 leaves"),
        (
            [np.zeros(3, np.uint8), np.zeros((2, 2), np.int8)],
            r"'n' is uint8 \(3,\), expected 2 lanes of uint8 \(\)",
        ),
        ([np.zeros(2, np.int64), np.zeros((2, 2), np.int8)], "'n' is int64"),
        ([("a", "b"), np.zeros((2, 2), np.int8)], "'n' is 2 texts"),
    ],
)
def test_columns_that_do_not_fit_are_refused(columns: list[Column], reason: str) -> None:
    with pytest.raises(CodecError, match=reason):
        encode_batch(DICT, columns, 2)


@pytest.mark.parametrize("column", [("a",), np.zeros(2), ("a", "\ud800")])
def test_what_is_no_column_of_texts_is_refused(column: Column) -> None:
    with pytest.raises(CodecError):
        encode_batch(TEXT, [column], 2)


@pytest.mark.parametrize("length", [0, 15, 17, 24])
def test_a_raw_batch_of_another_length_is_refused_with_both_numbers(length: int) -> None:
    spec = from_gymnasium(spaces.Box(0, 1, (2,)))

    with pytest.raises(CodecError, match=rf"{length} bytes, expected 16 \(2 lanes of float32"):
        decode_batch(spec, bytes(length), 2)


def node(**fields: Any) -> pb.SpaceValueNode:
    return pb.SpaceValueNode(**fields)


def mapping(**entries: pb.SpaceValueNode) -> pb.SpaceValueNode:
    return node(dict=pb.ValueMap(entries=entries))


def sequence(*items: pb.SpaceValueNode) -> pb.SpaceValueNode:
    return node(tuple=pb.ValueList(items=items))


B = {"b": node(multi=b"\0\0")}


@pytest.mark.parametrize(
    ("spec", "item", "reason"),
    [
        (DICT, mapping(n=node(discrete=1)), "no key 'b'"),
        (DICT, sequence(node(discrete=1)), "a value is tuple where the space has dict"),
        (DICT, node(), "a value is empty where the space has dict"),
        (DICT, mapping(n=node(text="1"), **B), "a value is text where the space has discrete"),
        (DICT, mapping(n=node(discrete=256), **B), "n: an integer is beyond uint8"),
        (DICT, mapping(n=node(discrete=-1), **B), "n: an integer is beyond uint8"),
        (DICT, mapping(n=node(discrete=1), b=node(multi=b"\0")), "b: 1 bytes, expected 2 a lane"),
        (
            DICT,
            mapping(n=node(discrete=1), b=node(tensor=b"\0\0")),
            "tensor where the space has multi",
        ),
        (TUPLE, sequence(node(tensor=bytes(4))), "has 1 parts, expected 2"),
        (TUPLE, sequence(node(tensor=bytes(5)), node(text="")), "0: 5 bytes, expected 4"),
        (TEXT, node(discrete=1), "discrete where the space has text"),
    ],
)
def test_a_node_that_does_not_fit_its_space_is_refused(
    spec: Any, item: pb.SpaceValueNode, reason: str
) -> None:
    with pytest.raises(CodecError, match=reason):
        decode_batch(spec, pb.ValueList(items=[item]).SerializeToString(), 1)


def test_lanes_must_fit_one_by_one_not_only_together() -> None:
    items = [mapping(n=node(discrete=1), b=node(multi=bytes(size))) for size in (1, 3)]

    with pytest.raises(CodecError, match="expected 2 a lane"):
        decode_batch(DICT, pb.ValueList(items=items).SerializeToString(), 2)


def test_an_empty_array_has_no_bytes() -> None:
    spec = from_gymnasium(spaces.Tuple([spaces.Box(0, 1, (0,))]))
    data = pb.ValueList(items=[sequence(node(tensor=b"abc"))]).SerializeToString()

    with pytest.raises(CodecError, match="3 bytes"):
        decode_batch(spec, data, 1)


@pytest.mark.parametrize("num_lanes", [0, 1, 3])
def test_another_number_of_lanes_is_refused(num_lanes: int) -> None:
    data = encode_batch(TEXT, [("a", "b")], 2)

    with pytest.raises(CodecError, match=f"2 lanes, expected {num_lanes}"):
        decode_batch(TEXT, data, num_lanes)


def test_keys_that_the_space_does_not_declare_are_left_out() -> None:
    item = mapping(n=node(discrete=3), more=node(text="x"), **B)

    columns = decode_batch(DICT, pb.ValueList(items=[item]).SerializeToString(), 1)

    assert len(columns) == len(leaves(DICT))


def test_a_large_batch_has_no_more_parts_than_its_lanes_need() -> None:
    num_lanes = 2**15
    columns: list[Column] = [np.zeros((num_lanes, 32), np.float32), np.zeros(num_lanes, np.int64)]
    spec = from_gymnasium(spaces.Tuple([spaces.Box(0, 1, (32,)), spaces.Discrete(2)]))
    assert_identical(decode_batch(spec, encode_batch(spec, columns, num_lanes), num_lanes), columns)

    with pytest.raises(CodecError, match="has more than 69632 parts"):
        decode_batch(spec, b"\n\0" * 2**21, 2)
