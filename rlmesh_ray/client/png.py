"""Decoding of rendered pictures."""

import io
import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def decode_png(png: bytes) -> NDArray[np.uint8]:
    """Return the picture as (height, width, 3) uint8."""
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        return np.array(image.convert("RGB"))


def tiles(picture: NDArray[np.uint8], count: int) -> tuple[NDArray[np.uint8], ...]:
    """Return the frames of ``count`` lanes, which an endpoint has tiled: see ``envs.vector_host``.

    Args:
        picture: All frames, row by row in a grid as square as possible.
        count: Number of frames.
    """
    num_columns = math.ceil(math.sqrt(count))
    height = picture.shape[0] // math.ceil(count / num_columns)
    width = picture.shape[1] // num_columns
    corners = (divmod(lane, num_columns) for lane in range(count))
    return tuple(
        picture[row * height : (row + 1) * height, column * width : (column + 1) * width].copy()
        for row, column in corners
    )
