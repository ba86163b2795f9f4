import enum
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.errors import CodecError
from rlmesh_ray.spaces.vector_infos import LEFT_OUT_KEY
from rlmesh_ray.testing.equality import assert_identical
from rlmesh_ray.testing.strategies import arrays, damaged, plain_infos
from rlmesh_ray.wire._pb.rlmesh.spaces.v1 import meta_pb2 as pb
from rlmesh_ray.wire.protobuf import parse
from rlmesh_ray.wire.rlmesh_v1.meta import (
    ARRAY_KEY,
    MAX_BYTES,
    MAX_NODES,
    MAX_PEER_NODES,
    MetaBudget,
    decode_meta,
    decode_peer_meta,
    encode_meta,
)


class Color(enum.Enum):
    RED = 1


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def there_and_back(infos: dict[Any, Any], *, tag_arrays: bool = False) -> dict[str, Any]:
    data = encode_meta(infos, tag_arrays=tag_arrays).SerializeToString()
    return decode_meta(pb.MetaMap.FromString(data))


@pytest.mark.parametrize("tag_arrays", [False, True])
@given(infos=plain_infos())
def test_plain_infos_come_back_equal(infos: dict[str, Any], tag_arrays: bool) -> None:
    assert there_and_back(infos, tag_arrays=tag_arrays) == infos


@given(array=arrays())
def test_a_tagged_array_comes_back_to_the_bit(array: Any) -> None:
    back = there_and_back({"a": {"b": [array]}}, tag_arrays=True)

    assert_identical(back, {"a": {"b": [array]}})
    assert back["a"]["b"][0].flags.writeable


@given(data=st.data())
def test_damaged_infos_are_refused_or_read(data: st.DataObject) -> None:
    frame = encode_meta({"a": data.draw(arrays()), "b": ["x"]}, tag_arrays=True)

    try:
        infos = decode_meta(parse(pb.MetaMap, data.draw(damaged(frame.SerializeToString()))))
    except CodecError:
        return

    assert isinstance(infos, dict)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.int8(-3), -3),
        (np.uint64(2**64 - 1), str(2**64 - 1)),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (bytearray(b"ab"), b"ab"),
        ((1, "a"), [1, "a"]),
        (2**63, str(2**63)),
        (-(2**63), -(2**63)),
        pytest.param(10**5000, "<int>", id="Python refuses to print it"),
        (Color.RED, "Color.RED"),
        ({3}, "{3}"),
        (1 + 2j, "(1+2j)"),
        (Unprintable(), "<Unprintable>"),
        ("a\udc80", "a?"),
        ({1: {None: 2}}, {"1": {"None": 2}}),
        ({"\udc80": 1}, {"?": 1}),
    ],
)
def test_odd_values_have_a_plain_form(value: Any, expected: Any) -> None:
    back = there_and_back({"x": value})["x"]

    assert back == expected
    assert type(back) is type(expected)


def test_an_untagged_array_is_a_nested_list() -> None:
    infos = {"a": np.array([[1, 2]]), "s": np.array(3.5), "o": np.array([None, "x"], object)}

    assert there_and_back(infos) == {"a": [[1, 2]], "o": [None, "x"], "s": 3.5}


def test_an_object_array_keeps_its_shape_and_what_it_holds() -> None:
    lanes = np.empty((2, 1), object)
    lanes[0, 0] = {"final": np.arange(3, dtype=np.int16)}

    back = there_and_back({"final_obs": lanes}, tag_arrays=True)["final_obs"]

    assert back.dtype == object
    assert back.shape == (2, 1)
    assert back[1, 0] is None
    assert_identical(back[0, 0], {"final": np.arange(3, dtype=np.int16)})


@pytest.mark.parametrize(
    "array",
    [np.array(["ab", "c"]), np.array(["2020-01-01"], "datetime64[D]"), np.zeros(1, "i4,f4")],
)
def test_an_array_without_numbers_is_an_array_of_objects(array: Any) -> None:
    back = there_and_back({"a": array}, tag_arrays=True)["a"]

    assert back.dtype == object
    assert back.shape == array.shape


def test_a_big_endian_array_keeps_its_numbers() -> None:
    back = there_and_back({"a": np.array([1, 2], ">i4")}, tag_arrays=True)["a"]

    assert back.tolist() == [1, 2]


def test_an_array_with_too_many_axes_is_not_tagged() -> None:
    there_and_back({"a": np.zeros((1,) * 40)}, tag_arrays=True)


@pytest.mark.parametrize("tag_arrays", [False, True])
@pytest.mark.parametrize("depth", [90, 100_000])
def test_what_is_nested_too_deep_becomes_text(depth: int, tag_arrays: bool) -> None:
    deep: Any = np.zeros(1)
    for _ in range(depth):
        deep = {"d": deep}

    back = there_and_back({"deep": deep}, tag_arrays=tag_arrays)["deep"]

    for _ in range(24):
        back = back["d"]
    assert back == "{'d': {'d': {...}}}"


def test_what_contains_itself_becomes_text_where_it_comes_again() -> None:
    cycle: list[Any] = [1]
    cycle += [cycle, {"again": cycle}]
    lanes = np.empty((), object)
    lanes[()] = lanes

    back = there_and_back({"cycle": cycle, "lanes": lanes, "own": cycle[2]})

    inner = "[1, [1, [...], {...}], {'again': [...]}]"
    assert back["cycle"] == [1, inner, {"again": inner}]
    assert back["own"] == {"again": [1, inner, "{'again': [1, [...], {...}]}"]}
    assert back["lanes"] == "<ndarray>"


def test_lists_that_hold_each_other_twice_end_as_text() -> None:
    doubled: Any = "x"
    for _ in range(80):
        doubled = [doubled, doubled]

    frame = encode_meta({"doubled": doubled, "after": 1}, tag_arrays=False)

    assert frame.ByteSize() < MAX_BYTES
    assert frame.entries["after"].int == 1


@pytest.mark.parametrize("tag_arrays", [False, True])
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(lambda: "x" * (MAX_BYTES + 65), f"<{MAX_BYTES + 65} of str>", id="str"),
        pytest.param(lambda: bytes(MAX_BYTES + 65), f"<{MAX_BYTES + 65} of bytes>", id="bytes"),
        pytest.param(lambda: [1] * MAX_BYTES, str([1] * 16)[:-1] + ", ...]", id="list"),
        pytest.param(lambda: np.zeros(MAX_BYTES), "<ndarray>", id="array"),
        pytest.param(lambda: np.full(MAX_BYTES, None), "<ndarray>", id="array of objects"),
    ],
)
def test_what_is_larger_than_a_frame_should_be_becomes_text(
    make: Callable[[], Any], expected: str, tag_arrays: bool
) -> None:
    back = there_and_back({"x": make(), "y": 2}, tag_arrays=tag_arrays)

    assert "entries of the infos were left out or made text" in back.pop(LEFT_OUT_KEY)
    assert back == {"x": expected, "y": 2}


def nested(depth: int) -> Any:
    value: Any = {"a": 1, "b": 2}
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "num_entries", "reason"),
    [
        pytest.param(np.zeros(10_000_000, np.float32), 10_000_000, "so many bytes", id="array"),
        pytest.param("x" * MAX_BYTES, 1, "so many bytes", id="text"),
        pytest.param([1] * MAX_NODES, MAX_NODES, "so many values", id="list"),
        pytest.param(nested(24), 2, "nested more than 24 deep", id="nested"),
    ],
)
def test_the_notice_counts_what_was_left_out_and_says_why(
    value: Any, num_entries: int, reason: str
) -> None:
    back = there_and_back({"x": value, "y": 2}, tag_arrays=True)

    notice = back.pop(LEFT_OUT_KEY)
    assert notice.startswith(f"{num_entries} entries of the infos were left out or made text: ")
    assert notice.count(": ") == 2
    assert reason in notice
    assert back["y"] == 2


def test_what_is_just_not_too_deep_is_kept_without_a_notice() -> None:
    infos = {"x": nested(23)}

    assert there_and_back(infos) == infos


def _num_values(message: pb.MetaMap) -> int:
    return sum(
        1 + _num_values(value.map) + len(value.list.items) + sum(map(_parts, value.list.items))
        for value in message.entries.values()
    )


def _parts(value: pb.MetaValue) -> int:
    return len(value.list.items) + sum(map(_parts, value.list.items)) + _num_values(value.map)


@pytest.mark.parametrize("tag_arrays", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: {"x": list(range(500_000))}, id="list"),
        pytest.param(lambda: {"x": [[1] * 1000 for _ in range(1000)]}, id="lists"),
        pytest.param(lambda: {"x": dict.fromkeys(map(str, range(100_000)))}, id="dict"),
        pytest.param(lambda: {str(key): [key] for key in range(100_000)}, id="keys"),
        pytest.param(lambda: {str(key): np.zeros(2) for key in range(10_000)}, id="arrays"),
        pytest.param(lambda: {"x": [np.full(1000, "text")] * 1000}, id="arrays of texts"),
    ],
)
def test_what_takes_too_long_to_write_becomes_text(
    make: Callable[[], dict[str, Any]], tag_arrays: bool
) -> None:
    message = encode_meta({"first": 1, **make()}, tag_arrays=tag_arrays)

    assert _num_values(message) <= MAX_NODES
    assert message.entries["first"].int == 1


def test_an_untagged_array_counts_as_what_it_becomes() -> None:
    infos = {"image": np.zeros((300, 300)), "small": np.zeros(2), "last": 1}

    back = there_and_back(infos)

    assert back.pop(LEFT_OUT_KEY).startswith("90000 entries ")
    assert back == {"image": "<ndarray>", "small": [0.0, 0.0], "last": 1}
    assert_identical(there_and_back(infos, tag_arrays=True)["image"], infos["image"])


def test_of_too_many_keys_the_first_remain_and_the_rest_is_counted() -> None:
    back = there_and_back({str(key): key for key in range(10_000)})

    assert back["0"] == 0
    assert back[LEFT_OUT_KEY].startswith(f"{10_000 - len(back) + 1} entries ")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: {"x": [10**4000] * 20_000}, id="values"),
        pytest.param(lambda: {"x": [{10**4000: 1}] * 8_000}, id="keys"),
    ],
)
def test_integers_that_take_long_to_write_share_the_room(
    make: Callable[[], dict[str, Any]],
) -> None:
    data = encode_meta(make(), tag_arrays=False).SerializeToString()

    assert 0 < data.count(str(10**4000).encode()) < 500
    assert b"<int>" in data


def test_keys_count_as_what_they_take() -> None:
    infos = {"x": [{"k" * 2**20: 1}] * 100}

    assert encode_meta(infos, tag_arrays=False).ByteSize() < MAX_BYTES


class Broken:
    """Containers and scalars whose own methods fail."""

    class Map(dict[str, int]):
        def items(self) -> Any:
            raise RuntimeError("no items")

    class List(list[int]):
        def __iter__(self) -> Any:
            raise RuntimeError("no parts")

    class Int(int):
        def __int__(self) -> int:
            raise RuntimeError("no number")

    class Float(float):
        def __float__(self) -> float:
            raise RuntimeError("no number")

    class Str(str):
        def isascii(self) -> bool:
            raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Broken.Map(x=1), "<Map>"),
        (Broken.List([1]), "<List>"),
        (Broken.Int(1), "<Int>"),
        (Broken.Float(1), "<Float>"),
        (Broken.Str("x"), "x"),
        ({Broken.Str("k"): 1}, {"k": 1}),
    ],
)
def test_a_value_that_fails_when_it_is_looked_at_costs_only_itself(
    value: Any, expected: Any
) -> None:
    assert there_and_back({"a": [value, 2]}) == {"a": [expected, 2]}


def test_of_two_keys_with_the_same_text_the_last_counts() -> None:
    assert there_and_back({1: [1], "1": [2], None: {"a": 1}, "None": None}) == {
        "1": [2],
        "None": None,
    }


class _Odd:
    def __repr__(self) -> str:
        return "odd"


def odd_values() -> st.SearchStrategy[Any]:
    """Draw what environments put into infos, and what they should not."""
    leaves = st.one_of(
        arrays(),
        st.integers(),
        st.floats(),
        st.complex_numbers(),
        st.text(st.characters(), max_size=8),
        st.binary(max_size=8).map(bytearray),
        st.sets(st.integers(), max_size=3),
        st.sampled_from([None, _Odd(), Unprintable(), Color.RED, range(3), Broken.Map(x=1)]),
        st.builds(iter, st.just([1, 2])),
        arrays().filter(lambda array: array.size > 0).map(lambda array: array.flat[0]),
    )
    return st.recursive(
        leaves,
        lambda parts: st.one_of(
            st.lists(parts, max_size=3),
            st.tuples(parts, parts),
            st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), parts, max_size=3),
            st.lists(parts, min_size=1, max_size=3).map(_objects),
        ),
        max_leaves=10,
    )


def _objects(parts: list[Any]) -> Any:
    array = np.empty(len(parts), object)
    for index, part in enumerate(parts):
        array[index] = part
    return array


@pytest.mark.parametrize("tag_arrays", [False, True])
@given(infos=st.dictionaries(st.text(max_size=4), odd_values(), max_size=4))
def test_any_infos_arrive_and_what_arrives_comes_back_equal(
    infos: dict[str, Any], tag_arrays: bool
) -> None:
    once = there_and_back(infos, tag_arrays=tag_arrays)

    assert set(once) == set(infos)
    assert_identical(there_and_back(once, tag_arrays=tag_arrays), once)


@pytest.mark.parametrize("depth", range(20, 30))
def test_an_array_at_any_depth_does_not_break_the_frame(depth: int) -> None:
    lanes = np.empty(1, object)
    lanes[0] = {"x": np.zeros(1)}
    value: Any = {"o": lanes, "a": np.zeros(1)}
    for _ in range(depth):
        value = {"d": value}

    there_and_back(value, tag_arrays=True)


def test_keys_come_in_alphabetical_order() -> None:
    assert list(there_and_back({"b": 1, "a": {"z": 1, "y": 2}, "_b": 3})) == ["_b", "a", "b"]


def test_a_users_map_in_the_form_of_an_array_is_text() -> None:
    infos = {"x": {ARRAY_KEY: {"dtype": "float32"}}}

    assert there_and_back(infos, tag_arrays=True) == {"x": str(infos["x"])}


@pytest.mark.parametrize(
    "plain",
    [
        5,
        {},
        {"dtype": "float32", "shape": [1]},
        {"dtype": "float32", "shape": [1], "data": b"abcd", "more": 1},
        {"dtype": "float32", "shape": [2], "data": b"abcd"},
        {"dtype": "float32", "shape": 1, "data": b"abcd"},
        {"dtype": "float32", "shape": [-1], "data": b"abcd"},
        {"dtype": "float32", "shape": [True], "data": b"abcd"},
        {"dtype": "float32", "shape": [1.0], "data": b"abcd"},
        {"dtype": "float32", "shape": [0, 2**62, 2**62], "data": b""},
        {"dtype": "float32", "shape": [1] * 40, "data": b"abcd"},
        {"dtype": "float32", "shape": [1], "data": [1.0]},
        {"dtype": "V4", "shape": [1], "data": b"abcd"},
        {"dtype": "U1", "shape": [1], "data": b"abcd"},
        {"dtype": [], "shape": [1], "data": b"abcd"},
        {"dtype": np.zeros(2), "shape": [1], "data": b"abcd"},
        {"dtype": "object", "shape": [2], "data": [1]},
        {"dtype": "object", "shape": [2], "data": b"abcdabcdabcdabcd"},
    ],
)
def test_a_tagged_array_that_makes_no_sense_is_refused(plain: Any) -> None:
    message = pb.MetaMap()
    fields = encode_meta({"plain": plain}, tag_arrays=True).entries["plain"]
    message.entries["x"].map.entries[ARRAY_KEY].CopyFrom(fields)

    with pytest.raises(CodecError, match=ARRAY_KEY):
        decode_meta(message)


def test_bools_of_a_tagged_array_are_zero_or_one() -> None:
    message = encode_meta({"a": np.array([True, True, False])}, tag_arrays=True)
    message.entries["a"].map.entries[ARRAY_KEY].map.entries["data"].bytes = b"\x02\x01\x00"

    assert decode_meta(message)["a"].tobytes() == b"\x01\x01\x00"


def test_options_that_would_hold_the_loop_are_refused_however_they_nest() -> None:
    wide = {str(number): number for number in range(MAX_PEER_NODES + 1)}
    deep = {"a": [{"b": [0] * 200}] * 200}
    for infos in (wide, deep):
        message = encode_meta(infos, tag_arrays=False, budget=MetaBudget(2**26, 2**20))

        with pytest.raises(CodecError, match="more than 16384 values"):
            decode_peer_meta(message)

    array = np.zeros(100_000)
    fields = decode_peer_meta(encode_meta({"a": array}, tag_arrays=True))
    assert np.array_equal(fields["a"], array)
