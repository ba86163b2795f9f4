"""RecordOptions: where episodes are recorded, how much of them, and what their videos show."""

import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from rlmesh_ray.errors import ConfigurationError, MissingPackageError, install_command
from rlmesh_ray.spaces.spec import Leaf, SpaceSpec, leaves

AUTO, RENDER, NO_VIDEO = "auto", "render", "none"
MAX_GB = 10.0
_SMALLEST_SIDE = 8


def require_folder(name: str, value: object) -> None:
    """Require that an option is the path of a folder, which need not exist.

    Raises:
        ConfigurationError: It is no path, or an empty text.
    """
    if not isinstance(value, (str, Path)) or not str(value).strip():
        raise ConfigurationError(f"{name}={value!r:.80} must be a folder")


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """Where and what to record; a folder alone stands for the defaults.

    Args:
        folder: A new folder, or a recording of the same environment, which is continued.
        max_gb: Size of the folder, in 10**9 bytes, at which recording stops. Nothing is deleted.
        video: ``"render"``: what ``render`` returns after each step, which then takes that much
            longer; the name of an image leaf of the observations, such as ``"camera.front"``
            (``""`` where the observation is the image); ``"none"``; or ``"auto"``: the first
            image leaf, else ``render`` where ``render_mode`` is ``rgb_array``, else none.

    Raises:
        ConfigurationError: A value is not possible.
        MissingPackageError: pyarrow is not installed; or, for a named video, PyAV.
    """

    folder: str | Path
    max_gb: float = MAX_GB
    video: str = AUTO

    def __post_init__(self) -> None:
        require_folder("record", self.folder)
        is_number = isinstance(self.max_gb, (int, float)) and not isinstance(self.max_gb, bool)
        if not (is_number and 0 < self.max_gb < math.inf):
            raise ConfigurationError(
                f"max_gb={self.max_gb!r:.80} (--record-max-gb) must be a number above 0"
            )
        if find_spec("pyarrow") is None:
            raise MissingPackageError(f"recording needs pyarrow: {install_command('recording')}")
        if self.video not in (AUTO, NO_VIDEO) and find_spec("av") is None:
            raise MissingPackageError(f"videos need PyAV: {install_command('recording')}")

    @classmethod
    def of(cls, record: "str | Path | RecordOptions") -> "RecordOptions":
        """Return the options of an argument ``record``."""
        return record if isinstance(record, RecordOptions) else cls(record)


def picture_position(video: str, observation_space: SpaceSpec) -> int | None:
    """Return the position of the leaf that videos show; None: they show no leaf.

    Args:
        video: See ``RecordOptions``.
        observation_space: The space.

    Raises:
        ConfigurationError: The named leaf is no image, or does not exist.
    """
    if video in (RENDER, NO_VIDEO):
        return None
    own = leaves(observation_space)
    images = {leaf.name: at for at, leaf in enumerate(own) if _is_image(leaf)}
    if video == AUTO:
        return min(images.values(), default=None)
    if video not in images:
        names = ", ".join(map(repr, images)) or "none"
        raise ConfigurationError(
            f"video={video!r:.80} (--record-video) names no image of the observations, which have "
            f"{names}; name one of them, 'render' or 'none'"
        )
    return images[video]


def _is_image(leaf: Leaf) -> bool:
    if leaf.dtype != np.uint8 or len(leaf.shape) not in (2, 3):
        return False
    sides = leaf.shape[1:] if has_channels_first(leaf.shape) else leaf.shape[:2]
    return min(sides) >= _SMALLEST_SIDE


def has_channels_first(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[0] < _SMALLEST_SIDE <= shape[2]
