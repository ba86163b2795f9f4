"""Frames to one PNG picture."""

import io
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def encode_png(frames: list[NDArray[np.uint8]]) -> bytes:
    """Return a PNG of ``frames``, tiled row by row in a grid as square as can be.

    Args:
        frames: At least one, ``(height, width, 3) uint8`` (or another layout that Pillow knows),
            all of one shape.
    """
    # Late: most workers never draw anything.
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(_tiled(frames)).save(stream, format="PNG")
    return stream.getvalue()


def as_frames(rendered: Any) -> list[NDArray[np.uint8]]:
    """Return the frames in what a VectorEnv renders: one a lane, a batch, or a single one."""
    if rendered is None:
        return []
    if isinstance(rendered, np.ndarray) and rendered.ndim == 3:
        return [rendered]
    return [np.asarray(frame) for frame in rendered if frame is not None]


def _tiled(frames: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    first = frames[0]
    num_columns = math.ceil(math.sqrt(len(frames)))
    num_rows = math.ceil(len(frames) / num_columns)
    height, width = first.shape[:2]
    picture = np.zeros((num_rows * height, num_columns * width, *first.shape[2:]), first.dtype)
    for index, frame in enumerate(frames):
        row, column = divmod(index, num_columns)
        top, left = row * height, column * width
        picture[top : top + height, left : left + width] = frame
    return picture
