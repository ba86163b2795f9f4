from typing import Any

import numpy as np
import pytest

from rlmesh_ray.testing.equality import assert_identical


@pytest.mark.parametrize(
    "value",
    [
        np.arange(3, dtype=np.int8),
        {"a": (np.float32(1.5), "text"), "b": [1, None]},
        np.array([None, np.zeros(2)], dtype=object),
        np.array([np.nan]),
    ],
)
def test_a_value_is_identical_to_itself(value: Any) -> None:
    assert_identical(value, value)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.zeros(2), np.zeros((1, 2))),
        (np.array([0.0]), np.array([-0.0])),
        ({"a": 1}, {}),
        ((1, 2), [1, 2]),
        ((1, 2), (1, 2, 3)),
        (np.array([None, np.zeros(2)], object), np.array([None, np.ones(2)], object)),
        ("a", "b"),
        (None, {}),
    ],
)
def test_a_difference_is_found(left: Any, right: Any) -> None:
    with pytest.raises(AssertionError, match="value"):
        assert_identical(left, right)


def test_the_order_of_keys_does_not_count() -> None:
    assert_identical({"a": 1, "b": 2}, {"b": 2, "a": 1})
