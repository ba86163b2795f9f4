"""Options of the commands that record episodes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlmesh_ray.cli.options.common import OUTPUT
from rlmesh_ray.errors import ConfigurationError

if TYPE_CHECKING:
    from rlmesh_ray.recording.options import RecordOptions

RecordOption = Annotated[
    Path | None,
    typer.Option(
        "--record",
        metavar="FOLDER",
        file_okay=False,
        rich_help_panel=OUTPUT,
        help="Record episodes there (Parquet, MP4).",
    ),
]
RecordMaxOption = Annotated[
    float,
    typer.Option(
        "--record-max-gb",
        metavar="GB",
        rich_help_panel=OUTPUT,
        help="Stop recording at this size of the folder.",
    ),
]
RecordVideoOption = Annotated[
    str,
    typer.Option(
        "--record-video",
        metavar="WHAT",
        rich_help_panel=OUTPUT,
        help="Videos of render, an image (its name) or none.",
        show_default=False,
    ),
]
RecordEveryOption = Annotated[
    int,
    typer.Option(
        "--record-every",
        min=1,
        metavar="N",
        rich_help_panel=OUTPUT,
        help="Record each Nth episode of a runner; those of evaluation, all.",
    ),
]


def record_options(folder: Path | None, max_gb: float, video: str) -> "RecordOptions | None":
    """Return the options of the three flags; None: nothing is recorded.

    Raises:
        ConfigurationError: A value is not possible, or belongs to no folder.
    """
    from rlmesh_ray.recording.options import AUTO, MAX_GB, RecordOptions

    if folder is not None:
        return RecordOptions(folder, max_gb, video)
    if max_gb != MAX_GB or video != AUTO:
        raise ConfigurationError(
            "--record-max-gb and --record-video say how to record: add --record FOLDER"
        )
    return None
