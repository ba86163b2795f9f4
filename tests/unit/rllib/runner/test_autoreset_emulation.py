"""The infos of all lanes at once are those of each lane alone."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.rllib.runner.autoreset_emulation import NoInfos, joined, lane_infos
from rlmesh_ray.spaces.vector_infos import lane_info
from rlmesh_ray.testing.equality import assert_identical

LANES = 3
VALUES: dict[str, Any] = {
    "numbers": np.array([1.5, -2.0, np.nan]),
    "narrow": np.array([1, 2, 3], np.int8),
    "flags": np.array([True, False, True]),
    "words": np.array(["a", "bc", ""]),
    "objects": np.array([None, np.float32(2), [3]], dtype=object),
    "rows": np.arange(6).reshape(3, 2),
    "long": np.arange(5),
    "short": np.arange(2),
    "list": [4, 5, 6],
    "nested": {"deep": np.arange(3), "_deep": np.array([False, True, True])},
    "text": "note",
    "scalar": np.float64(3.5),
}
MASKS: list[Any] = [
    None,
    np.array([True, False, True]),
    np.array([True, True]),
    [True, False, False],
    np.array([1, 0, 1]),
    "mask",
]


@given(
    kinds=st.lists(
        st.tuples(
            st.sampled_from(["x", "_x", "__x", "y"]),
            st.sampled_from(sorted(VALUES)),
            st.integers(0, len(MASKS) - 1),
        ),
        max_size=3,
    )
)
def test_all_lanes_get_what_each_would_get(kinds: list[tuple[str, str, int]]) -> None:
    infos: dict[str, Any] = {}
    for key, value, mask in kinds:
        infos[key] = VALUES[value]
        if MASKS[mask] is not None:
            infos[f"_{key}"] = MASKS[mask]

    expected = [lane_info(infos, lane) for lane in range(LANES)]

    assert_identical(list(lane_infos(infos, LANES)), expected, "infos")


@pytest.mark.parametrize("value", sorted(set(VALUES) - {"short"}))
def test_an_array_with_a_mask_is_taken_apart_likewise(value: str) -> None:
    infos = {"x": VALUES[value], "_x": np.array([True, False, True])}

    expected = [lane_info(infos, lane) for lane in range(LANES)]

    assert_identical(list(lane_infos(infos, LANES)), expected, "infos")


def test_lanes_without_infos_do_not_share_a_dict() -> None:
    first, second = lane_infos({}, 2)
    first["mine"] = 1

    assert second == {}


def test_lanes_without_infos_are_as_many_as_there_are() -> None:
    infos = lane_infos({}, 3)

    assert list(infos) == [{}, {}, {}]
    with pytest.raises(IndexError):
        infos[3]


def test_sessions_without_infos_are_joined_without_making_any() -> None:
    assert isinstance(joined([NoInfos(2), NoInfos(3)]), NoInfos)
    assert list(joined([NoInfos(2), NoInfos(3)])) == [{}] * 5


def test_sessions_with_and_without_infos_are_joined_lane_by_lane() -> None:
    assert list(joined([NoInfos(1), [{"x": 1}, {}]])) == [{}, {"x": 1}, {}]
