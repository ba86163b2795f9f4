"""Infos of released endpoints, as gymnasium's vectors would have given them."""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import VectorEnv
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.dialects.released.client.env_dialect import as_vector_infos
from rlmesh_ray.spaces.vector_infos import lane_info
from rlmesh_ray.testing.equality import assert_identical

WARNING = "rlmesh.conformance.warning"
TWO = (0, 1)


def gymnasiums(infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Let gymnasium make a vector's infos of those of lanes."""
    vector: VectorEnv[Any, Any, Any] = VectorEnv()
    vector.num_envs = len(infos)
    joined: dict[str, Any] = {}
    for lane, info in enumerate(infos):
        joined = vector._add_info(joined, info, lane)
    return joined


def as_lists(value: Any) -> Any:
    """Return infos as they come from the wire."""
    if isinstance(value, Mapping):
        return {key: as_lists(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        return as_lists(value.tolist())
    return [as_lists(part) for part in value] if isinstance(value, list) else value


LEAVES = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
)
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "won": st.booleans(),
    "count": st.integers(-(2**63), 2**63 - 1),
    "score": st.floats(allow_nan=False),
    "name": st.text(max_size=3),
}
NESTED = KINDS | {"episode": st.fixed_dictionaries({}, optional=KINDS)}
INFOS = st.lists(st.fixed_dictionaries({}, optional=NESTED), min_size=2, max_size=4)


@given(INFOS)
def test_infos_of_independent_lanes_are_joined_as_gymnasium_joins_them(
    infos: list[dict[str, Any]],
) -> None:
    lanes = range(len(infos))
    reported = {"final_info": infos, "_final_info": [False] * len(infos)}

    assert_identical(as_vector_infos(reported, lanes, len(infos)), gymnasiums(infos))


@given(INFOS)
def test_infos_of_a_vector_get_their_arrays_back(infos: list[dict[str, Any]]) -> None:
    given_infos = gymnasiums(infos)

    made = as_vector_infos(as_lists(given_infos), range(len(infos)), len(infos))

    assert_identical(made, given_infos)


KEYS = st.sampled_from(["a", "b", "_c", "is_success"])
PLAIN = st.recursive(
    LEAVES | st.none() | st.binary(max_size=3) | st.lists(st.integers(0, 9), max_size=3),
    lambda parts: st.dictionaries(KEYS, parts, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(KEYS, PLAIN, max_size=4))
def test_a_single_environment_gets_back_what_it_has_reported(info: dict[str, Any]) -> None:
    made = as_vector_infos(info, (0,), 1)

    assert_identical(lane_info(made, 0), info)


def test_a_single_environments_infos_are_those_of_a_vector_of_one() -> None:
    infos = as_vector_infos({"x": 4, "in": {"y": "b"}}, (0,), 1)

    mask = np.array([True])
    inner = {"y": np.array(["b"], object), "_y": mask}
    assert_identical(infos, {"x": np.array([4]), "_x": mask, "in": inner, "_in": mask})


def test_lanes_that_were_reset_alone_stand_at_their_places() -> None:
    reported = {"final_info": [{"x": 5}, {"x": 7}], "_final_info": [True, True]}

    infos = as_vector_infos(reported, (2, 0), 3)
    alone = as_vector_infos({"x": 4}, (1,), 3)

    assert_identical(infos, {"x": np.array([7, 0, 5]), "_x": np.array([True, False, True])})
    assert_identical(alone, {"x": np.array([0, 4, 0]), "_x": np.array([False, True, False])})


def test_lanes_of_a_vector_that_were_reset_alone_stand_at_their_places() -> None:
    reported = {"x": [5, 0], "_x": [True, False], "name": ["a", "b"], "_name": [True, True]}

    infos = as_vector_infos(reported, (1, 2), 3)

    name = np.array([None, "a", "b"], object)
    assert_identical(
        infos,
        {
            "x": np.array([0, 5, 0]),
            "_x": np.array([False, True, False]),
            "name": name,
            "_name": np.array([False, True, True]),
        },
    )


def test_arrays_of_lanes_become_one_array_where_they_have_one_shape() -> None:
    mask = [True, True]
    reported = {
        "image": [[[1, 2], [3, 4]], [[5, 6], [7, 8]]], "_image": mask,
        "ragged": [[1], [1, 2]], "_ragged": mask,
        "empty": [[], []], "_empty": mask,
        "mixed": [[1, "a"], [2, "b"]], "_mixed": mask,
    }  # fmt: skip

    infos = as_vector_infos(reported, TWO, 2)

    assert_identical(infos["image"], np.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]]))
    for key in ("ragged", "empty", "mixed"):
        entries = infos[key]
        assert isinstance(entries, np.ndarray)
        assert entries.dtype == object
        assert entries.tolist() == reported[key]


def test_what_no_lane_is_named_for_stays_as_it_is() -> None:
    reported = {"steps": [1, 2, 3], "room": {"size": [4, 5], "_size": [True, True]}}

    infos = as_vector_infos(reported, TWO, 2)

    assert infos["steps"] == [1, 2, 3]
    room = infos["room"]
    assert isinstance(room, dict)
    assert_identical(room["size"], np.array([4, 5]))


def test_lists_in_lists_without_end_become_no_array() -> None:
    value: Any = 1
    for _ in range(40):
        value = [value]

    infos = as_vector_infos({"x": [value, value], "_x": [True, True]}, TWO, 2)

    assert isinstance(infos["x"], np.ndarray)
    assert infos["x"].dtype == object


@pytest.mark.parametrize("lanes", [(0,), TWO])
def test_warnings_have_the_editions_words(lanes: tuple[int, ...]) -> None:
    warning = {"kind": "observation", "path": "$.cam.0", "detail": "$.cam.0: too bright"}
    reported: dict[str, Any] = {WARNING: [warning]}
    if len(lanes) > 1:
        reported |= {"final_info": [{WARNING: [warning]}, {"x": 1}], "_final_info": [False, False]}

    infos = as_vector_infos(reported, lanes, len(lanes))

    assert infos[WARNING] == ["observation.cam.0: too bright"]
    assert set(infos) == ({WARNING} if len(lanes) == 1 else {WARNING, "x", "_x"})


@pytest.mark.parametrize(
    ("warning", "texts"),
    [("odd", "odd"), ([7, {}], ["7", ": "]), ([{"path": 3, "detail": None}], ["3: None"])],
)
def test_odd_warnings_do_no_harm(warning: object, texts: object) -> None:
    assert as_vector_infos({WARNING: warning}, (0,), 1) == {WARNING: texts}


def test_an_environment_of_gymnasium_tells_what_the_lists_were_made_from() -> None:
    vector = gymnasium.make_vec("CartPole-v1", 2, "sync")
    vector = gymnasium.wrappers.vector.RecordEpisodeStatistics(vector)
    vector.reset(seed=1)
    infos: dict[str, Any] = {}
    while "episode" not in infos:
        *_, infos = vector.step(np.array([1, 0]))

    made = as_vector_infos(as_lists(infos), TWO, 2)

    assert_identical(made["_episode"], infos["_episode"])
    episode = made["episode"]
    assert isinstance(episode, dict)
    assert {type(entries) for entries in episode.values()} == {np.ndarray}
    for key, entries in episode.items():
        np.testing.assert_allclose(entries, infos["episode"][key])
