"""Options of the commands that record episodes."""

from pathlib import Path

import pytest

from rlmesh_ray.cli.options.recording import record_options
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.recording import RecordOptions


def test_how_to_record_goes_with_the_folder() -> None:
    assert record_options(Path("there"), 2.0, "none") == RecordOptions(Path("there"), 2.0, "none")
    assert record_options(None, 10.0, "auto") is None


@pytest.mark.parametrize(
    ("max_gb", "video", "every"), [(2.0, "auto", None), (10.0, "none", None), (10.0, "auto", 10)]
)
def test_how_to_record_is_refused_without_the_folder(
    max_gb: float, video: str, every: int | None
) -> None:
    with pytest.raises(ConfigurationError, match="add --record FOLDER"):
        record_options(None, max_gb, video, every)
