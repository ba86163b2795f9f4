"""Pictures that an endpoint renders."""

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def decode_png(png: bytes) -> NDArray[np.uint8]:
    """Return the picture as (height, width, 3) uint8."""
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        return np.array(image.convert("RGB"))
