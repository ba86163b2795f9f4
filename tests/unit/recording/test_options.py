"""Options of a recording."""

import sys
from pathlib import Path
from typing import Any

import pytest

from rlmesh_ray.errors import ConfigurationError, MissingPackageError
from rlmesh_ray.recording import RecordOptions


def test_a_folder_stands_for_the_defaults() -> None:
    options = RecordOptions("there", max_gb=2)

    assert RecordOptions.of("there") == RecordOptions("there", 10.0, "auto")
    assert RecordOptions.of(options) is options


@pytest.mark.parametrize(
    "wrong",
    [
        {"folder": ""},
        {"folder": " "},
        {"folder": 3},
        {"folder": Path("a"), "max_gb": 0},
        {"folder": "a", "max_gb": float("nan")},
        {"folder": "a", "max_gb": "1"},
        {"folder": "a", "max_gb": True},
    ],
)
def test_a_wrong_value_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="must be"):
        RecordOptions(**wrong)


def test_a_video_that_is_asked_for_is_refused_where_pyav_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)

    for video in ("render", "camera.front", ""):
        with pytest.raises(MissingPackageError, match="videos need PyAV: pip install"):
            RecordOptions("there", video=video)
    for video in ("auto", "none"):
        RecordOptions("there", video=video)
