from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlmesh_ray.errors import ConformanceError
from rlmesh_ray.spaces.batch import coerce, drop_unit_axis
from rlmesh_ray.spaces.gym_conversion import Space, from_gymnasium
from rlmesh_ray.spaces.spec import Leaf, leaves


def leaf_of(space: Space) -> Leaf:
    (leaf,) = leaves(from_gymnasium(space))
    return leaf


def box(dtype: Any, shape: tuple[int, ...] = (2,)) -> Leaf:
    return leaf_of(spaces.Box(0, 1, shape, dtype))


INT8 = leaf_of(spaces.Box(-128, 127, (2,), np.int8))
DISCRETE = leaf_of(spaces.Discrete(5))
TEXT = leaf_of(spaces.Text(5))


def refusal(leaf: Leaf, value: Any, num_lanes: int | None = None) -> ConformanceError:
    with pytest.raises(ConformanceError) as caught:
        coerce(leaf, value, num_lanes)
    return caught.value


@pytest.mark.parametrize("num_lanes", [None, 3])
def test_an_array_that_fits_is_handed_on_itself(num_lanes: int | None) -> None:
    shape = (2,) if num_lanes is None else (3, 2)
    value = np.zeros(shape, np.float32)

    assert coerce(box(np.float32), value, num_lanes) is value


@pytest.mark.parametrize(
    "value",
    [[0.5, 1.0], (0, 1), np.array([0.5, 1.0]), np.array([True, False]), np.array([1, 2], ">i2")],
)
def test_numbers_become_the_declared_float(value: Any) -> None:
    coerced = coerce(box(np.float32), value, None)

    assert coerced.dtype == np.float32
    np.testing.assert_array_equal(coerced, np.asarray(value, np.float32))


def test_a_float_beyond_a_narrower_float_becomes_infinite_without_a_warning() -> None:
    coerced = coerce(box(np.float32), [1e300, -1e300], None)

    assert coerced.tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize(
    "value",
    [
        [-128.0, 127.0],
        np.array([-0.0, 5.0]),
        np.array([1, 2], np.float16),
        np.array([1, 2], np.uint64),
        [True, False],
        np.array([3, np.int64(4)], object),
    ],
)
def test_integral_numbers_become_the_declared_integer(value: Any) -> None:
    coerced = coerce(INT8, value, None)

    assert coerced.dtype == np.int8
    assert coerced.tolist() == [int(number) for number in value]


@pytest.mark.parametrize(
    "value",
    [
        [0.5, 1.0],
        [np.nan, 1.0],
        [np.inf, 1.0],
        [-np.inf, 1.0],
        [128.0, 0.0],
        [-129.0, 0.0],
        [128, 0],
        [-129, 0],
        np.array([255, 0], np.uint8),
        [2**70, 0],
        [None, 1],
        [1j, 1],
        ["1", "2"],
        np.array(["2020-01-01", "2020-01-02"], "datetime64[D]"),
    ],
)
def test_a_number_that_the_integer_cannot_hold_is_refused(value: Any) -> None:
    assert refusal(INT8, value).kind == "dtype"


@pytest.mark.parametrize("name", ["int64", "uint64"])
def test_the_ends_of_wide_integers_are_exact(name: str) -> None:
    info = np.iinfo(name)
    leaf = leaf_of(spaces.Box(int(info.min), int(info.max), (2,), np.dtype(name).type))

    assert coerce(leaf, [int(info.min), int(info.max)], None).tolist() == [info.min, info.max]
    # NumPy reads this list as floats.
    assert coerce(leaf, [1, int(info.max)], None).tolist() == [1, info.max]
    assert refusal(leaf, [float(info.max), 0.0]).kind == "dtype"
    assert refusal(leaf, [int(info.max) + 1, 0]).kind == "dtype"
    assert refusal(leaf, [int(info.min) - 1, 0]).kind == "dtype"


def test_only_zero_and_one_become_bool() -> None:
    leaf = box(np.bool_)

    assert coerce(leaf, [0, 1], None).tolist() == [False, True]
    assert coerce(leaf, [0.0, 1.0], None).tolist() == [False, True]
    assert refusal(leaf, [0, 2]).kind == "dtype"
    assert refusal(leaf, [0.5, 1.0]).kind == "dtype"


@pytest.mark.parametrize("value", [[1.0], [[1.0, 2.0]], 1.0, [1.0, 2.0, 3.0], {}, [[1.0], [1, 2]]])
def test_a_wrong_shape_is_structural(value: Any) -> None:
    error = refusal(box(np.float32), value)

    assert error.kind == "structure"


def test_a_wrong_shape_is_named_with_the_expected_one() -> None:
    leaf = leaves(from_gymnasium(spaces.Dict({"cam": spaces.Box(0, 1, (2,))})))[0]

    assert str(refusal(leaf, np.zeros((3, 4)), 3)) == "cam: has shape (3, 4), expected (3, 2)"


def test_the_offending_number_is_named() -> None:
    assert str(refusal(INT8, [1.0, 0.5])) == "value: 0.5 cannot be held exactly by int8"
    assert str(refusal(INT8, np.array([127, 300]))) == "value: 300 cannot be held exactly by int8"


def test_what_refuses_to_become_an_array_is_structural() -> None:
    class Stubborn:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            raise RuntimeError("needs grad")

    assert "needs grad" in str(refusal(box(np.float32), Stubborn()))


@pytest.mark.parametrize("value", [3, np.int8(3), 3.0, np.array(3), np.uint64(3)])
def test_a_discrete_lane_value_is_a_scalar_of_its_dtype(value: Any) -> None:
    coerced = coerce(DISCRETE, value, None)

    assert coerced == 3
    assert type(coerced) is np.int64


def test_a_discrete_batch_is_a_column() -> None:
    column = coerce(DISCRETE, [1, 2, 3], 3)

    assert column.dtype == np.int64
    assert column.shape == (3,)


def test_lanes_in_an_object_array_are_stacked() -> None:
    lanes = np.empty(2, object)
    lanes[:] = [np.zeros(2), np.ones(2)]

    column = coerce(box(np.float32), lanes, 2)

    np.testing.assert_array_equal(column, [[0, 0], [1, 1]])


@pytest.mark.parametrize(
    ("value", "num_axes", "expected"),
    [
        (np.ones((2, 1)), 1, (2,)),
        ([np.ones(1), np.ones(1)], 1, (2,)),
        (np.ones(1), 0, ()),
        (np.ones((2, 3, 1)), 2, (2, 3)),
        (np.ones(1), 1, (1,)),
        (np.ones((2, 2)), 1, (2, 2)),
    ],
)
def test_a_number_of_rllibs_loses_its_axis(value: Any, num_axes: int, expected: Any) -> None:
    assert np.shape(drop_unit_axis(box("f4", ()), value, num_axes)) == expected
    assert drop_unit_axis(box("f4", (1,)), value, num_axes) is value


@pytest.mark.parametrize("value", [("a", "b"), ["a", "b"], np.array(["a", "b"])])
def test_texts_become_a_tuple_of_plain_strings(value: Any) -> None:
    column = coerce(TEXT, value, 2)

    assert column == ("a", "b")
    assert [type(text) for text in column] == [str, str]


@pytest.mark.parametrize("value", ["ab", ("a",), ("a", 1), 5, b"ab", None])
def test_what_is_no_batch_of_texts_is_structural(value: Any) -> None:
    assert refusal(TEXT, value, 2).kind == "structure"


def test_a_single_text_must_be_a_string() -> None:
    assert coerce(TEXT, np.str_("abc"), None) == "abc"
    assert refusal(TEXT, 5).kind == "structure"


def test_a_text_that_utf8_cannot_express_is_refused() -> None:
    assert "UTF-8" in str(refusal(TEXT, "a\ud800"))


@given(value=hnp.arrays(st.sampled_from(["f8", "f4", "i8", "u8", "i2"]), 2))
def test_an_integer_is_exact_or_refused(value: Any) -> None:
    try:
        coerced = coerce(INT8, value, None)
    except ConformanceError:
        assert any(number not in range(-128, 128) for number in value.tolist())
    else:
        assert coerced.tolist() == value.tolist()
