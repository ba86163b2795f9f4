from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Text

from rlmesh_ray.envs.vector_host import checked, rows_of
from rlmesh_ray.errors import ConformanceError
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.spec import leaves
from rlmesh_ray.spaces.validation import (
    Checker,
    ConformanceWarning,
    ValidationMode,
    WarningCounter,
)
from rlmesh_ray.testing.equality import assert_identical

SPACE = Dict(
    {
        "box": Box(2.0, 3.0, (2,), np.float32),
        "choice": Discrete(3, start=5),
        "text": Text(4, min_length=2, charset="abc"),
    }
)
SOUND: list[Any] = [np.full((2, 2), 2.5, np.float32), np.array([5, 7]), ("ab", "abc")]


def check(
    columns: list[Any],
    lanes: tuple[int, ...] = (),
    validation: ValidationMode = ValidationMode.WARN,
) -> list[ConformanceWarning]:
    checker = Checker(leaves(from_gymnasium(SPACE)), validation)
    return checked(checker, columns, lanes)


def with_leaf(position: int, value: Any) -> list[Any]:
    return [value if index == position else leaf for index, leaf in enumerate(SOUND)]


@pytest.mark.parametrize("validation", ValidationMode)
def test_rows_that_conform_pass_with_any_values_in_other_lanes(validation: ValidationMode) -> None:
    assert check(SOUND, (3, 1), validation) == []


@pytest.mark.parametrize(
    ("columns", "path", "where"),
    [
        (with_leaf(0, np.array([[2, 9], [2, 2]], np.float32)), "box", "lane 3, element (1,)"),
        (with_leaf(2, ("ab", "abcabc")), "text", "lane 1"),
        (with_leaf(2, ("zz", "ab")), "text", "lane 3"),
    ],
)
def test_what_is_found_in_some_rows_names_its_lane(
    columns: list[Any], path: str, where: str
) -> None:
    (warning,) = check(columns, (3, 1))

    assert (warning.side, warning.path) == ("observation", path)
    assert f"({where})" in warning.detail


@pytest.mark.parametrize(
    ("columns", "where"),
    [
        (with_leaf(1, np.array([5, 9])), "lane 1"),
        (with_leaf(0, np.full((2, 2), np.nan, np.float32)), "lane 3"),
    ],
)
def test_what_breaks_the_structure_names_its_lane(columns: list[Any], where: str) -> None:
    with pytest.raises(ConformanceError, match=where):
        check(columns, (3, 1), ValidationMode.OFF)


def test_each_violation_is_reported_once_and_counted_each_time() -> None:
    counter = WarningCounter()
    bad: list[Any] = [np.full((4, 2), 9, np.float32), np.full(4, 5), ("ab",) * 4]

    first = counter.unreported(check(bad))
    again = [
        counter.unreported(check(bad)),
        counter.unreported(check(rows_of(bad, (2,)), (2,))),
    ]
    other = counter.unreported(check(with_leaf(2, ("a", "ab")), (0, 1)))

    assert [warning.path for warning in first] == ["box"]
    assert again == [[], []]
    assert [(warning.path, warning.kind) for warning in other] == [("text", "length")]
    assert counter.num_found == 4


def test_rows_are_copies_in_the_lanes_order() -> None:
    column = np.arange(6.0).reshape(3, 2)

    rows = rows_of([column, ("a", "b", "c")], (2, 0))

    assert_identical(rows, [np.array([[4.0, 5.0], [0.0, 1.0]]), ("c", "a")])
    assert not np.shares_memory(rows[0], column)
