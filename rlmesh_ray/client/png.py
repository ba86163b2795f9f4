"""The pictures in answers to Render."""

import io
import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rlmesh_ray.client.env_session_client import EnvSessionClient
from rlmesh_ray.errors import ConfigurationError, LocalProtocolError
from rlmesh_ray.protocol.capabilities import NDARRAY
from rlmesh_ray.transport.direct_connection import Pictures


def decode_png(png: bytes) -> NDArray[np.uint8]:
    """Return the picture as (height, width, 3) uint8."""
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        return np.array(image.convert("RGB"))


def render_lanes(client: EnvSessionClient) -> Pictures | None:
    """Render all lanes of a session.

    Returns:
        One picture per lane, (height, width, 3) uint8; None for a render mode that returns nothing
        in gymnasium either.

    Raises:
        LocalProtocolError: The lanes have no picture yet.
        ConfigurationError: The render mode returns something other than pictures.
    """
    rendered, contract = client.render(), client.contract
    if isinstance(rendered, bytes):
        picture = decode_png(rendered)
        if NDARRAY in client.answer.capabilities:
            return tiles(picture, contract.num_envs)
        return (picture,) * contract.num_envs
    if rendered is not None:
        return rendered
    if contract.render_mode == "rgb_array":
        raise LocalProtocolError(
            f"{client.address} has no picture: reset() before render(); if it was reset, the "
            "render() of its environment returned None"
        )
    if contract.render_mode not in ("", "human"):
        raise ConfigurationError(
            f"{client.address} has render mode {contract.render_mode!r}, and only pictures travel; "
            "serve the environment with render_mode='rgb_array'"
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
