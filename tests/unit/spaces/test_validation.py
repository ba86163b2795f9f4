from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.errors import ConformanceError
from rlmesh_ray.spaces.batch import stack
from rlmesh_ray.spaces.gym_conversion import Space, from_gymnasium
from rlmesh_ray.spaces.spec import Column, SpaceSpec, leaves
from rlmesh_ray.spaces.validation import (
    Checker,
    ConformanceWarning,
    ValidationMode,
    coerce_batch,
    has_nan,
)
from rlmesh_ray.testing.strategies import batches, gymnasium_spaces

BOOL: Any = np.bool_  # gymnasium takes it; its annotations do not
UNIT = spaces.Box(-1, 1, (2,), np.float64)
BOUNDED_ABOVE = spaces.Box(np.array([-np.inf, 0.0]), np.array([1.0, np.inf]), dtype=np.float64)


def checked(
    space: Space, column: Any, validation: ValidationMode = ValidationMode.WARN
) -> list[ConformanceWarning]:
    spec = from_gymnasium(space)
    return Checker(leaves(spec), validation).check([column])


def refusal(space: Space, column: Any, validation: ValidationMode) -> ConformanceError:
    with pytest.raises(ConformanceError) as caught:
        checked(space, column, validation)
    return caught.value


@pytest.mark.parametrize("validation", ValidationMode)
@pytest.mark.parametrize("space", [UNIT, BOUNDED_ABOVE, spaces.Box(-np.inf, np.inf, (2,))])
def test_nan_is_structural_under_every_policy(space: Space, validation: ValidationMode) -> None:
    # 9 is out of bounds as well: NaN comes first.
    column = np.array([[0.0, 0.5], [9.0, np.nan]], space.dtype)

    error = refusal(space, column, validation)

    assert error.kind == "structure"
    assert error.reason == "is NaN (lane 1, element (1,))"


@pytest.mark.parametrize("validation", ValidationMode)
@pytest.mark.parametrize(
    ("space", "column"),
    [
        (spaces.Discrete(3), [0, 3]),
        (spaces.Discrete(3), [-1, 0]),
        (spaces.Discrete(3, start=-2), [0, 1]),
        (spaces.MultiDiscrete([2, 3]), [[1, 1], [1, 3]]),
        (spaces.MultiDiscrete([2, 3]), [[1, 1], [2, 1]]),
        (spaces.MultiDiscrete([2, 3]), [[1, -1], [1, 1]]),
        (spaces.MultiBinary(2), [[0, 1], [2, 0]]),
        (spaces.MultiBinary(2), [[0, -1], [0, 0]]),
    ],
)
def test_leaving_a_domain_is_structural_under_every_policy(
    space: Space, column: Any, validation: ValidationMode
) -> None:
    error = refusal(space, np.array(column, space.dtype), validation)

    assert error.kind == "structure"


@pytest.mark.parametrize("validation", ValidationMode)
def test_a_single_choice_is_held_against_its_domain_as_many_are(validation: ValidationMode) -> None:
    space: Space = spaces.Discrete(3, start=-1)

    for inside in (-1, 0, 1):
        assert checked(space, np.array([inside]), validation) == []
    for outside in (-2, 2):
        assert refusal(space, np.array([outside]), validation).kind == "structure"


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(1,), (3, 4), (2, 600)])
def test_one_nan_is_found_wherever_it_stands_and_nothing_else_is_taken_for_one(
    dtype: Any, shape: tuple[int, ...]
) -> None:
    largest = np.finfo(dtype).max
    column = np.resize(np.array([largest, -largest, np.inf, -np.inf, -0.0], dtype), shape)
    assert not has_nan(column)
    assert not has_nan(column[..., ::-1])
    assert not has_nan(column[:0])

    for place in range(column.size):
        spoiled = column.copy()
        spoiled.flat[place] = np.nan
        assert has_nan(spoiled)
        assert has_nan(spoiled[..., ::-1])


def test_the_last_value_of_a_wide_multi_discrete_belongs_to_it() -> None:
    largest = np.iinfo(np.uint8).max
    space = spaces.MultiDiscrete([largest], np.uint8)

    assert checked(space, np.array([[largest - 1]], np.uint8)) == []
    assert refusal(space, np.array([[largest]], np.uint8), ValidationMode.OFF).kind == "structure"


def test_a_range_violation_names_place_and_bound() -> None:
    column = np.array([[0.0, 0.0], [0.0, 1.5]])

    assert checked(UNIT, column) == [
        ConformanceWarning("observation", "range", "", "1.5 is above 1.0 (lane 1, element (1,))")
    ]
    assert checked(UNIT, -column) == [
        ConformanceWarning("observation", "range", "", "-1.5 is below -1.0 (lane 1, element (1,))")
    ]


def test_a_range_deviation_is_rejected_when_strict() -> None:
    error = refusal(UNIT, np.array([[2.0, 0.0]]), ValidationMode.STRICT)

    assert error.kind == "range"
    assert "2.0 is above 1.0" in error.reason


def test_ranges_are_not_looked_at_when_off() -> None:
    assert checked(UNIT, np.array([[2.0, np.inf]]), ValidationMode.OFF) == []
    assert checked(spaces.Text(2), ("much too long!",), ValidationMode.OFF) == []


def test_infinity_is_in_range_against_a_matching_infinite_bound() -> None:
    assert checked(BOUNDED_ABOVE, np.array([[-np.inf, np.inf]]), ValidationMode.STRICT) == []
    assert refusal(BOUNDED_ABOVE, np.array([[np.inf, 0]]), ValidationMode.STRICT).kind == "range"
    assert refusal(BOUNDED_ABOVE, np.array([[0, -np.inf]]), ValidationMode.STRICT).kind == "range"


@pytest.mark.parametrize(
    ("space", "column", "expected"),
    [
        (spaces.Box(0, 255, (1,), np.uint8), [[255]], 0),
        (spaces.Box(0, 9, (1,), np.uint8), [[10]], 1),
        (spaces.Box(-(2**63), 2**63 - 1, (1,), np.int64), [[2**63 - 1]], 0),
        (spaces.Box(0, 1, (1,), BOOL), [[True]], 0),
        (spaces.Box(0, 0, (1,), BOOL), [[True]], 1),
        (spaces.Box(0, 1, (), np.float32), [2.0], 1),
        (spaces.Box(0, 1, (0,), np.float32), [[]], 0),
    ],
)
def test_bounds_hold_for_every_dtype_and_rank(space: Space, column: Any, expected: int) -> None:
    assert len(checked(space, np.array(column, space.dtype))) == expected


def test_a_text_deviates_once_in_length_and_once_in_charset() -> None:
    space = spaces.Text(2, charset="ab")

    assert checked(space, ("ab", "abab", "c", "", "zz")) == [
        ConformanceWarning(
            "observation", "length", "", "has 4 characters, expected 1 to 2 (lane 1)"
        ),
        ConformanceWarning("observation", "charset", "", "'c' is not in the charset (lane 2)"),
    ]
    assert refusal(space, ("c",), ValidationMode.STRICT).kind == "range"


def test_the_length_of_a_text_counts_characters() -> None:
    assert checked(spaces.Text(2, charset="漢🎲"), ("漢🎲",), ValidationMode.STRICT) == []


def test_every_leaf_is_checked_and_named() -> None:
    spec = from_gymnasium(spaces.Dict({"a": UNIT, "b": spaces.Tuple([UNIT])}))
    far = np.array([[9.0, 0.0]])

    found = Checker(leaves(spec), ValidationMode.WARN).check([far, far])

    assert [deviation.path for deviation in found] == ["a", "b.0"]


def test_a_batched_value_is_coerced_leaf_by_leaf() -> None:
    spec = from_gymnasium(spaces.Dict({"a": spaces.Discrete(3), "t": spaces.Text(3)}))

    columns = coerce_batch(spec, {"t": ["x", "y"], "a": [1.0, 2.0]}, 2)

    assert isinstance(columns[0], np.ndarray)
    assert columns[0].dtype == np.int64
    assert columns[0].tolist() == [1, 2]
    assert columns[1] == ("x", "y")


@given(space=gymnasium_spaces())
def test_the_low_end_of_every_space_conforms(space: Space) -> None:
    spec = from_gymnasium(space)
    value = lowest(space)

    assert Checker(leaves(spec), ValidationMode.STRICT).check(stack(spec, [value, value])) == []


def lowest(space: Space) -> Any:
    match space:
        case spaces.Box():
            return space.low
        case spaces.Text():
            return min(space.character_set) * space.min_length
        case spaces.Dict():
            return {key: lowest(part) for key, part in space.spaces.items()}
        case spaces.Tuple():
            return tuple(lowest(part) for part in space.spaces)
        case spaces.Discrete():
            return space.start
    return np.zeros(space.shape or (), space.dtype)


@given(data=st.data())
def test_any_bits_are_reported_or_refused_and_never_break_the_check(data: st.DataObject) -> None:
    spec = data.draw(gymnasium_spaces().map(from_gymnasium))
    columns = data.draw(batches(spec, 2))

    assert kinds_of(spec, columns) <= {"range", "length", "charset", "structure"}


def kinds_of(spec: SpaceSpec, columns: list[Column]) -> set[str]:
    try:
        deviations = Checker(leaves(spec), ValidationMode.WARN).check(columns)
    except ConformanceError as error:
        return {error.kind}
    return {deviation.kind for deviation in deviations}
