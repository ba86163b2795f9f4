from typing import Any

import numpy as np
import pytest
from gymnasium.vector import VectorEnv

from rlmesh_ray.spaces.vector_infos import (
    lane_entries,
    lane_info,
    lanes_infos,
    merged_infos,
    with_arrays,
)
from rlmesh_ray.testing.equality import assert_identical


def test_a_lane_gets_only_the_keys_that_its_mask_names() -> None:
    infos = {
        "speed": np.array([1.5, 0.0]),
        "_speed": np.array([True, False]),
        "hits": np.array([0, 3]),
        "_hits": np.array([False, True]),
    }

    assert lane_info(infos, 0) == {"speed": 1.5}
    assert lane_info(infos, 1) == {"hits": 3}


def test_plain_numbers_come_back_as_python_scalars_and_arrays_as_arrays() -> None:
    infos = {
        "n": np.array([7]),
        "_n": np.array([True]),
        "position": np.array([[1.0, 2.0]]),
        "_position": np.array([True]),
    }

    own = lane_info(infos, 0)

    assert type(own["n"]) is int
    assert isinstance(own["position"], np.ndarray)


def test_nested_infos_are_taken_apart_too() -> None:
    infos = {
        "physics": {"contacts": np.array([4, 0]), "_contacts": np.array([True, False])},
        "_physics": np.array([True, False]),
    }

    assert lane_info(infos, 0) == {"physics": {"contacts": 4}}
    assert lane_info(infos, 1) == {}


def test_shared_keys_without_a_mask_belong_to_every_lane() -> None:
    assert lane_info({"note": ["x", "y"]}, 1) == {"note": ["x", "y"]}


@pytest.mark.parametrize(
    "mask",
    [
        "text",
        5,
        [],
        [[True]],
        np.array(True),
        np.array(["x"]),
        np.array([[True], [True]]),
        {"a": 1},
        b"\1\1",
    ],
)
def test_what_a_peer_sends_in_place_of_a_mask_is_an_info_of_its_own(mask: Any) -> None:
    infos = {"x": [1, 2], "_x": mask, "_alone": [True, True]}

    assert_identical(lane_info(infos, 1), infos)


@pytest.mark.parametrize("value", ["text", None, [1], np.array(3), np.zeros(1)])
def test_a_value_without_an_entry_for_the_lane_is_kept_whole(value: Any) -> None:
    assert_identical(lane_info({"x": value, "_x": [True, True]}, 1), {"x": value})


def test_some_lanes_get_the_form_of_a_vector_of_their_own() -> None:
    infos = {
        "speed": np.array([1.5, 0.0, 2.5]),
        "_speed": np.array([True, False, True]),
        "names": ["a", "b", "c"],
        "_names": [True, True, True],
        "hits": np.array([0, 3, 0]),
        "_hits": np.array([False, True, False]),
        "physics": {"contacts": np.array([4, 0, 6]), "_contacts": np.array([True, False, True])},
        "_physics": np.array([True, False, True]),
        "note": "shared",
    }

    assert_identical(
        lanes_infos(infos, (2, 0)),
        {
            "speed": np.array([2.5, 1.5]),
            "_speed": np.array([True, True]),
            "names": ["c", "a"],
            "_names": np.array([True, True]),
            "physics": {"contacts": np.array([6, 4]), "_contacts": np.array([True, True])},
            "_physics": np.array([True, True]),
            "note": "shared",
        },
    )


@pytest.mark.parametrize("lanes", [(0,), (1,), (1, 0)])
def test_each_of_some_lanes_has_the_infos_that_it_had(lanes: tuple[int, ...]) -> None:
    infos = {
        "speed": np.array([1.5, 0.0]),
        "_speed": np.array([True, False]),
        "lists": np.array([[1], None], object),
        "_lists": np.array([True, False]),
        "deep": {"x": {"y": np.array([1, 2]), "_y": np.array([False, True])}},
    }

    own = lanes_infos(infos, lanes)

    for position, lane in enumerate(lanes):
        assert_identical(lane_info(own, position), lane_info(infos, lane))


@pytest.mark.parametrize("mask", ["text", 5, [], [[True]], np.array(True), {"a": 1}])
def test_what_is_no_mask_is_an_info_of_some_lanes_too(mask: Any) -> None:
    infos = {"x": [1, 2], "_x": mask, "_alone": [True, True]}

    assert_identical(lanes_infos(infos, (1, 0)), infos)


def test_a_value_without_an_entry_for_each_lane_is_kept_whole() -> None:
    infos = {"x": [1], "_x": [True, True]}

    assert lanes_infos(infos, (1,))["x"] == [1]


def test_infos_of_some_lanes_and_of_others_become_those_of_all() -> None:
    first = {
        "speed": np.array([1.5, 0.0]),
        "_speed": np.array([True, False]),
        "physics": {"contacts": np.array([4, 0]), "_contacts": np.array([True, False])},
        "_physics": np.array([True, False]),
        "mine": np.array([1, 0]),
        "_mine": np.array([True, False]),
    }
    second = {
        "speed": np.array([0.0, 2.5]),
        "_speed": np.array([False, True]),
        "physics": {"contacts": np.array([0, 7]), "_contacts": np.array([False, True])},
        "_physics": np.array([False, True]),
        "yours": np.array([0, 2]),
        "_yours": np.array([False, True]),
    }

    merged = merged_infos(first, second)

    assert lane_info(merged, 0) == {"speed": 1.5, "physics": {"contacts": 4}, "mine": 1}
    assert lane_info(merged, 1) == {"speed": 2.5, "physics": {"contacts": 7}, "yours": 2}
    assert lane_info(first, 1) == {}, "what was given has not changed"


def test_infos_of_other_kinds_are_merged_lane_by_lane() -> None:
    first = {"goal": np.array([1, 0]), "_goal": np.array([True, False])}
    second = {"goal": ["", "home"], "_goal": [False, True]}

    merged = merged_infos(first, second)

    assert [lane_info(merged, lane) for lane in (0, 1)] == [{"goal": 1}, {"goal": "home"}]


def test_the_warnings_of_both_halves_are_kept() -> None:
    key = "rlmesh.conformance.warning"

    merged = merged_infos({key: ["low"], "note": "a"}, {key: ["high"], "note": "b"})

    assert merged == {key: ["low", "high"], "note": "b"}


def test_an_info_of_some_lanes_has_the_form_that_gymnasium_gives_it() -> None:
    vector: VectorEnv[Any, Any, Any] = VectorEnv()
    vector.num_envs = 3
    theirs: dict[str, Any] = {}
    for lane, texts in {2: ["a", "b"], 0: ["c"]}.items():
        theirs = vector._add_info(theirs, {"x": texts}, lane)

    assert_identical(lane_entries("x", {2: ["a", "b"], 0: ["c"]}, 3), theirs)


def test_what_came_once_for_several_lanes_belongs_to_each_of_them() -> None:
    infos = {"x": ["a"], "y": "b", "speed": np.array([1.5, 0.0, 0.0]), "other": ["c"]}

    found = with_arrays(infos, ("x", "y", "absent"), (0, 2), 3)

    assert_identical(
        found,
        {
            **infos,
            **lane_entries("x", {0: ["a"], 2: ["a"]}, 3),
            **lane_entries("y", {0: "b", 2: "b"}, 3),
        },
    )
    assert_identical(with_arrays(found, ("x", "y"), (1,), 3), found)


def test_the_text_in_place_of_a_value_belongs_to_the_lanes_that_had_it() -> None:
    mask = np.array([True, False, True])
    infos = {"x": "<dict>", "_x": mask, "deep": {"y": "<dict>", "_y": mask}, "_deep": mask}
    infos |= {"z": [1, 2, 3], "_z": mask}

    assert_identical(
        with_arrays(infos, (), (0, 1, 2), 3),
        {
            **infos,
            **lane_entries("x", {0: "<dict>", 2: "<dict>"}, 3),
            "deep": lane_entries("y", {0: "<dict>", 2: "<dict>"}, 3),
        },
    )
