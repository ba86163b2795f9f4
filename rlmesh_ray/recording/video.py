"""Video files of episodes, H.264 in MP4, and which pictures they show."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import ConfigurationError, MissingPackageError, install_command
from rlmesh_ray.recording.options import AUTO, NO_VIDEO, RENDER
from rlmesh_ray.spaces.leaves import Leaf, leaves
from rlmesh_ray.spaces.spec import SpaceSpec

_SMALLEST_SIDE = 8
_OPTIONS = {"preset": "veryfast", "tune": "zerolatency", "threads": "1"}


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
    sides = leaf.shape[1:] if _has_channels_first(leaf.shape) else leaf.shape[:2]
    return min(sides) >= _SMALLEST_SIDE


def _has_channels_first(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[0] < _SMALLEST_SIDE <= shape[2]


def as_rgb(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return frames ``(count, height, width, 3)`` with even sides, as H.264 wants them.

    Args:
        images: ``(count, *shape)``, with the channels last or first. Three are colours; of any
            other number the last one is shown in grey, which is the newest of stacked frames.
    """
    if _has_channels_first(images.shape[1:]):
        images = np.moveaxis(images, 1, -1)
    if images.ndim == 3:
        images = images[..., np.newaxis]
    if images.shape[-1] != 3:
        images = np.repeat(images[..., -1:], 3, axis=-1)
    odd = images.shape[1] % 2, images.shape[2] % 2
    if not any(odd):
        return images  # np.pad would copy them
    return np.pad(images, ((0, 0), (0, odd[0]), (0, odd[1]), (0, 0)), mode="edge")


class VideoFile:
    """An MP4 file that is being written; any of its methods may raise errors of PyAV.

    Args:
        path: Its path.
        fps: Frames a second.

    Raises:
        MissingPackageError: PyAV is not installed, or has no encoder for H.264.
    """

    def __init__(self, path: Path, fps: float) -> None:
        try:
            import av
        except ImportError as error:
            needed = f"videos need PyAV: {install_command('recording')} ({error})"
            raise MissingPackageError(needed) from error
        self.path = path
        self._frame_from = av.VideoFrame.from_ndarray
        self._container = av.open(str(path), "w", format="mp4")
        rate = Fraction(fps).limit_denominator(1000)
        try:
            self._stream: Any = self._container.add_stream("libx264", rate=rate, options=_OPTIONS)
        except av.codec.codec.UnknownCodecError as error:
            raise MissingPackageError(
                "this PyAV has no libx264 (H.264), which PyAV's wheels have: pip install "
                "--force-reinstall --only-binary av av"
            ) from error
        self._stream.pix_fmt = "yuv420p"
        self._num_frames = 0

    def add(self, images: NDArray[np.uint8]) -> None:
        for image in as_rgb(images):
            if not self._num_frames:
                self._stream.height, self._stream.width = image.shape[:2]
            frame = self._frame_from(image, format="rgb24")
            frame.pts = self._num_frames
            self._num_frames += 1
            self._container.mux(self._stream.encode(frame))

    def close(self) -> None:
        if self._num_frames:
            self._container.mux(self._stream.encode(None))
        self._container.close()
