"""PNG encoding of rendered frames."""

import io
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def encode_png(frames: list[NDArray[np.uint8]]) -> bytes:
    """Return a PNG of ``frames``, tiled row by row in a nearly square grid.

    Args:
        frames: At least one, ``(height, width, 3) uint8`` (or another layout that Pillow knows),
            all of one shape.
    """
    # Late: most workers never render.
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(_tiled(frames)).save(stream, format="PNG")
    return stream.getvalue()


def as_frames(rendered: Any) -> list[NDArray[np.uint8]]:
    """Return the frames in a VectorEnv's render result: a sequence, a batch, or a single frame."""
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
