"""Decoding of rendered pictures."""

import io
import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rlmesh_ray.errors import ConfigurationError, LocalProtocolError


def decode_png(png: bytes) -> NDArray[np.uint8]:
    """Return the picture as (height, width, 3) uint8."""
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        return np.array(image.convert("RGB"))


def decode_frame(
    png: bytes | None, render_mode: str | None, address: str
) -> NDArray[np.uint8] | None:
    """Return the picture in the answer to a render.

    Args:
        png: Of the answer; None where it has none.
        render_mode: The environment's.
        address: The endpoint's, for messages.

    Returns:
        (height, width, 3) uint8; None for a render mode that returns nothing in gymnasium either.

    Raises:
        LocalProtocolError: The lanes have no picture yet.
        ConfigurationError: The render mode returns something other than pictures.
    """
    if png is not None:
        return decode_png(png)
    if render_mode == "rgb_array":
        raise LocalProtocolError(
            f"{address} has no picture: reset() before render(); if it was reset, the render() of "
            "its environment returned None"
        )
    if render_mode not in (None, "human"):
        raise ConfigurationError(
            f"{address} has render mode {render_mode!r}, and only pictures travel; serve the "
            "environment with render_mode='rgb_array'"
        )
    return None


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
