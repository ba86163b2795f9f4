"""Options of the commands that record episodes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlmesh_ray.cli.options.common import OUTPUT, folder_option
from rlmesh_ray.errors import ConfigurationError

if TYPE_CHECKING:
    from rlmesh_ray.recording.options import RecordOptions

RecordOption = Annotated[
    Path | None,
    folder_option("--record", OUTPUT, "Record episodes there (Parquet, MP4)."),
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
    int | None,
    typer.Option(
        "--record-every",
        min=1,
        metavar="N",
        rich_help_panel=OUTPUT,
        help="Record each Nth episode of a runner; those of evaluation, all.",
        show_default="10",
    ),
]


def record_options(
    folder: Path | None, max_gb: float, video: str, every: int | None = None
) -> "RecordOptions | None":
    """Return the options of the flags; None: nothing is recorded.

    Args:
        folder: ``--record``.
        max_gb: ``--record-max-gb``.
        video: ``--record-video``.
        every: ``--record-every``, if it was given, which is no part of the result.

    Raises:
        ConfigurationError: A value is not possible, or belongs to no folder.
    """
    from rlmesh_ray.recording.options import AUTO, MAX_GB, RecordOptions

    if folder is not None:
        return RecordOptions(folder, max_gb, video)
    given = {
        "--record-max-gb": max_gb != MAX_GB,
        "--record-video": video != AUTO,
        "--record-every": every is not None,
    }
    if names := [name for name, is_given in given.items() if is_given]:
        raise ConfigurationError(
            f"{' and '.join(names)} without --record: nothing is recorded; add --record FOLDER"
        )
    return None
