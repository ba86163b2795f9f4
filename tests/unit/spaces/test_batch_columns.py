from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rlmesh_ray.errors import ConformanceError
from rlmesh_ray.spaces.batch import (
    Column,
    concatenate,
    empty_columns,
    replace_lanes,
    split,
    write_lane_values,
)
from rlmesh_ray.spaces.spec import BoxSpec, DiscreteSpec, Leaf, leaves


def test_what_was_joined_comes_apart_again() -> None:
    first: list[Column] = [np.array([[1], [2]]), ("a", "b")]
    second: list[Column] = [np.array([[3]]), ("c",)]

    joined = concatenate([first, second])
    parts = split(joined, [2, 1])

    assert joined[1] == ("a", "b", "c")
    for part, original in zip(parts, [first, second], strict=True):
        np.testing.assert_array_equal(part[0], original[0])
        assert part[1] == original[1]


def test_a_single_batch_is_not_copied() -> None:
    column = np.zeros(2)

    assert concatenate([[column]])[0] is column


def test_only_the_named_lanes_are_replaced() -> None:
    columns: list[Column] = [np.array([1, 2, 3]), ("a", "b", "c")]
    other: list[Column] = [np.array([7, 8, 9]), ("x", "y", "z")]

    merged = replace_lanes(columns, other, [0, 2])

    np.testing.assert_array_equal(merged[0], [7, 2, 9])
    assert merged[1] == ("x", "b", "z")


def leaf_of(spec: BoxSpec | DiscreteSpec) -> Leaf:
    return leaves(spec)[0]


def box(shape: tuple[int, ...], dtype: str) -> BoxSpec:
    zero = np.zeros(1, dtype).tobytes()
    return BoxSpec(shape, dtype, zero, np.ones(1, dtype).tobytes())


@pytest.mark.parametrize(
    "values",
    [
        [np.zeros(4, np.float32), np.ones(4, np.float32), np.full(4, 2, np.float32)],
        [np.zeros(4, np.float32), np.ones(4, np.int8), np.full(4, 2.0)],
        [np.zeros(4, np.float32), [1, 1.0, True, 1], np.full(8, 2, np.float32)[::2]],
        [np.ma.zeros(4, np.float32), np.ones(4, ">f4"), (2, 2, 2, 2)],
    ],
)
def test_arrays_of_any_kind_are_written(values: list[Any]) -> None:
    spec = box((4,), "float32")
    column = empty_columns(spec, 3)[0]

    assert write_lane_values(leaf_of(spec), column, range(3), values) is column

    np.testing.assert_array_equal(column, np.repeat([[0], [1], [2]], 4, axis=1))


@pytest.mark.parametrize(
    "shapes", [[(3,), (5,)], [(4,), ()], [(8,), (0,)], [(4, 1), (4, 1)], [(2, 2), (2, 2)]]
)
def test_shapes_that_only_add_up_are_refused(shapes: list[tuple[int, ...]]) -> None:
    spec = box((4,), "float32")
    values = [np.zeros(shape, np.float32) for shape in shapes]

    with pytest.raises(ConformanceError, match="has shape"):
        write_lane_values(leaf_of(spec), empty_columns(spec, 2)[0], range(2), values)


def test_every_lane_gets_its_own_value_in_any_order() -> None:
    spec = box((2, 2), "uint8")
    column = empty_columns(spec, 3)[0]

    write_lane_values(
        leaf_of(spec), column, (2, 0, 1), [np.full((2, 2), n, np.uint8) for n in (7, 8, 9)]
    )

    np.testing.assert_array_equal(np.asarray(column)[:, 0, 0], [8, 9, 7])


def test_a_column_that_is_part_of_another_array_is_written_too() -> None:
    spec = box((2,), "float32")
    whole = np.zeros((3, 2, 2), np.float32)

    values = [np.ones(2, np.float32)] * 3
    write_lane_values(leaf_of(spec), whole[:, 0], range(3), values)

    assert whole[:, 0].all()
    assert not whole[:, 1].any()


def test_arrays_without_elements_are_written() -> None:
    spec = box((2, 0), "float32")

    column = write_lane_values(
        leaf_of(spec), empty_columns(spec, 2)[0], range(2), [np.zeros((2, 0))] * 2
    )

    assert np.shape(column) == (2, 2, 0)


@pytest.mark.parametrize(
    "values",
    [
        [3, 1, 2],
        [np.int64(3), np.int64(1), np.int64(2)],
        [3, np.array(1), np.uint8(2)],
        [3.0, 1, 2],
    ],
)
def test_numbers_of_any_kind_are_written(values: list[Any]) -> None:
    spec = DiscreteSpec(5, 0, "int64")

    column = write_lane_values(leaf_of(spec), empty_columns(spec, 3)[0], range(3), values)

    np.testing.assert_array_equal(column, [3, 1, 2])


@pytest.mark.parametrize("value", [2.5, 2**70, float("nan"), "2", None, [1]])
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_a_number_that_does_not_fit_is_refused(value: object, dtype: type[np.generic]) -> None:
    spec = DiscreteSpec(5, 0, np.dtype(dtype).name)
    column: NDArray[Any] = np.zeros(2, dtype)

    for values in ([1, value], [value, value]):
        with pytest.raises(ConformanceError):
            write_lane_values(leaf_of(spec), column, range(2), values)
