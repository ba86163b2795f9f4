import numpy as np

from rlmesh_ray.spaces.batch import Column
from rlmesh_ray.spaces.columns import concatenate, replace_lanes, split


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
