import pickle

import numpy as np
import pytest

from rlmesh_ray.spaces.validation import (
    WARNING_KEY,
    ConformanceWarning,
    warnings_as_maps,
    warnings_as_texts,
    warnings_info,
)
from rlmesh_ray.spaces.vector_infos import lane_entries
from rlmesh_ray.testing.equality import assert_identical

ROOT = ConformanceWarning("action", "range", "", "3.0 is above 1.0 (lane 0)")
INNER = ConformanceWarning("observation", "length", "cam.depth", "is long", 2)


def test_the_edition_s_clients_get_warnings_as_text() -> None:
    infos = {"x": 1, **warnings_info([ROOT, INNER, ROOT], 3)}
    of_one, of_two = "action: 3.0 is above 1.0 (lane 0)", "observation.cam.depth: is long"

    assert_identical(
        warnings_as_texts(infos),
        {
            "x": 1,
            WARNING_KEY: np.array([[of_one, of_one], None, [of_two]], object),
            f"_{WARNING_KEY}": np.array([True, False, True]),
        },
    )


@pytest.mark.parametrize(
    "infos", [warnings_info([ROOT, INNER], 3), {WARNING_KEY: [ROOT, INNER]}], ids=["all", "one"]
)
def test_released_clients_get_warnings_as_maps(infos: dict[str, object]) -> None:
    assert warnings_as_maps(infos) == {
        WARNING_KEY: [
            {"path": "$", "kind": "action", "detail": "$: 3.0 is above 1.0 (lane 0)"},
            {
                "path": "$.cam.depth",
                "kind": "observation",
                "detail": "$.cam.depth: is long",
            },
        ]
    }


@pytest.mark.parametrize(
    "infos",
    [
        {},
        {"x": 1},
        {WARNING_KEY: "own"},
        {WARNING_KEY: ["own", ROOT]},
        lane_entries(WARNING_KEY, {1: ["own", ROOT]}, 2),
        lane_entries(WARNING_KEY, {0: "own"}, 2),
        {WARNING_KEY: np.zeros(2), f"_{WARNING_KEY}": np.ones(2, np.bool_)},
    ],
)
def test_infos_without_our_warnings_are_handed_on_as_they_are(infos: dict[str, object]) -> None:
    assert warnings_as_texts(infos) is infos
    assert warnings_as_maps(infos) is infos


def test_warnings_travel_between_processes() -> None:
    assert pickle.loads(pickle.dumps([ROOT, INNER])) == [ROOT, INNER]
