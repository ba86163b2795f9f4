"""What the infos of a session's lanes look like to its client."""

from collections.abc import Sequence

import numpy as np
import pytest

from rlmesh_ray.dialects.released.protocol import WIRE_V1
from rlmesh_ray.protocol.capabilities import PROTOCOL_V1
from rlmesh_ray.server.env.env_service import load_env_dialects
from rlmesh_ray.spaces.validation import WARNING_KEY, ConformanceWarning, warnings_info

INFOS = {
    "speed": np.array([1.5, 2.5, 3.5]),
    "_speed": np.array([True, True, False]),
    **warnings_info([ConformanceWarning("observation", "range", "cam", "too high", 1)], 3),
}
MAPS = [{"path": "$.cam", "kind": "observation", "detail": "$.cam: too high"}]


def plain(infos: object) -> object:
    """Return ``infos`` with lists for arrays."""
    assert isinstance(infos, dict)
    return {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in infos.items()
    }


@pytest.mark.parametrize(
    ("lanes", "reported"),
    [
        (
            (0, 1, 2),
            {"speed": [1.5, 2.5, 3.5], "_speed": [True, True, False], WARNING_KEY: MAPS},
        ),
        ((2, 1), {"speed": [3.5, 2.5], "_speed": [False, True], WARNING_KEY: MAPS}),
        ((1,), {"speed": 2.5, WARNING_KEY: MAPS}),
        ((2,), {}),
    ],
)
def test_released_clients_are_reported_the_lanes_that_they_have_named(
    lanes: Sequence[int], reported: dict[str, object]
) -> None:
    infos = load_env_dialects()[WIRE_V1].infos(INFOS, lanes, 3)

    assert plain(infos) == reported


def test_clients_of_the_edition_get_the_mode_of_the_vector() -> None:
    infos = load_env_dialects()[PROTOCOL_V1].infos(INFOS, (1,), 3)

    assert infos["speed"] is INFOS["speed"]
    assert plain(infos)[WARNING_KEY] == [None, ["observation.cam: too high"], None]  # type: ignore[index]
