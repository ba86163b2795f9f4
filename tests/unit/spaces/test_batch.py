from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from rlmesh_ray.errors import ConformanceError
from rlmesh_ray.spaces.batch import empty_columns, flatten, leaves, stack, unflatten
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.testing.equality import assert_identical

SPACE = spaces.Dict(
    [
        ("pose", spaces.Box(-1, 1, (2,))),
        ("tool", spaces.Tuple([spaces.Discrete(3), spaces.Text(4)])),
        ("flags", spaces.MultiBinary(2)),
    ]
)
SPEC = from_gymnasium(SPACE)
VALUE = {"pose": np.zeros(2, np.float32), "tool": (np.int64(1), "ab"), "flags": np.ones(2, np.int8)}


def refusal(value: Any) -> str:
    with pytest.raises(ConformanceError) as caught:
        flatten(SPEC, value)
    assert caught.value.kind == "structure"
    return str(caught.value)


def test_flatten_gives_the_leaves_untouched() -> None:
    found = flatten(SPEC, VALUE)

    assert found[0] is VALUE["pose"]
    assert found[1:3] == [1, "ab"]
    assert found[3] is VALUE["flags"]


def test_unflatten_undoes_flatten_in_the_order_of_the_spec() -> None:
    nested = unflatten(SPEC, flatten(SPEC, dict(reversed(VALUE.items()))))

    assert_identical(nested, VALUE)


def test_unflatten_wants_one_value_a_leaf() -> None:
    with pytest.raises(ValueError, match="3 values for 4 leaves"):
        unflatten(SPEC, [1, 2, 3])


def test_keys_that_are_not_declared_are_left_out() -> None:
    assert len(flatten(SPEC, VALUE | {"more": 1})) == 4


@pytest.mark.parametrize("tool", [[1, "ab"], np.array([1, 2])])
def test_lists_and_arrays_stand_for_tuples(tool: Any) -> None:
    assert flatten(SPEC, VALUE | {"tool": tool})[1] == 1


def test_a_missing_key_is_named() -> None:
    assert refusal({"pose": 1, "flags": 1}) == "value: has no key 'tool'"


def test_a_wrong_arity_is_named_with_its_place() -> None:
    assert refusal(VALUE | {"tool": (1,)}) == "tool: has 1 parts, expected 2"


@pytest.mark.parametrize("tool", ["ab", 5, None, {0: 1, 1: "ab"}, np.array(5)])
def test_what_is_no_sequence_is_no_tuple(tool: Any) -> None:
    assert "expected a tuple" in refusal(VALUE | {"tool": tool})


def test_what_is_no_mapping_is_no_dict() -> None:
    assert refusal([1, 2, 3]) == "value: is list, expected a mapping"


def test_empty_columns_have_the_leaves_dtypes_and_shapes() -> None:
    columns = empty_columns(SPEC, 3)

    for leaf, column in zip(leaves(SPEC), columns, strict=True):
        if leaf.dtype is None:
            assert column == ("", "", "")
        else:
            assert isinstance(column, np.ndarray)
            assert column.dtype == leaf.dtype
            assert column.shape == (3, *leaf.shape)
            assert not column.any()


def test_stacking_gives_what_gymnasium_concatenates() -> None:
    SPACE.seed(5)
    values = [SPACE.sample() for _ in range(4)]

    columns = stack(SPEC, values)

    expected: Any = concatenate(SPACE, values, create_empty_array(SPACE, 4))
    assert_identical(unflatten(SPEC, columns), {key: expected[key] for key in SPACE.spaces})


def test_stacking_coerces() -> None:
    columns = stack(from_gymnasium(spaces.Box(0, 9, (2,), np.uint8)), [[1.0, 2.0], (3, 4)])

    assert_identical(columns, [np.array([[1, 2], [3, 4]], np.uint8)])


def test_stacking_a_misfit_names_the_leaf() -> None:
    with pytest.raises(ConformanceError, match=r"tool\.0: 1\.5 cannot"):
        stack(SPEC, [VALUE, VALUE | {"tool": (1.5, "ab")}])
