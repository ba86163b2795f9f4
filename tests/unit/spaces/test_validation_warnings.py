import pickle

import pytest

from rlmesh_ray.spaces.validation import Violation
from rlmesh_ray.spaces.validation_warnings import (
    WARNING_KEY,
    ConformanceWarning,
    warnings_as_maps,
    warnings_as_texts,
)

ROOT = ConformanceWarning.of("action", Violation("range", "", "3.0 is above 1.0 (lane 0)"))
INNER = ConformanceWarning.of("observation", Violation("length", "cam.depth", "is long"))


def test_the_edition_s_clients_get_warnings_as_text() -> None:
    infos = {"x": 1, WARNING_KEY: [ROOT, INNER]}

    assert warnings_as_texts(infos) == {
        "x": 1,
        WARNING_KEY: ["action: 3.0 is above 1.0 (lane 0)", "observation.cam.depth: is long"],
    }


def test_released_clients_get_warnings_as_maps() -> None:
    assert warnings_as_maps({WARNING_KEY: [ROOT, INNER]}) == {
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
    "infos", [{}, {"x": 1}, {WARNING_KEY: "own"}, {WARNING_KEY: ["own", ROOT]}]
)
def test_infos_without_our_warnings_are_handed_on_as_they_are(infos: dict[str, object]) -> None:
    assert warnings_as_texts(infos) is infos
    assert warnings_as_maps(infos) is infos


def test_warnings_travel_between_processes() -> None:
    assert pickle.loads(pickle.dumps([ROOT, INNER])) == [ROOT, INNER]
