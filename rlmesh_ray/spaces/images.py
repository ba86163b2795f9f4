"""Image leaves of a space, and how their pixels are resized."""

import numpy as np
from numpy.typing import NDArray

Size = tuple[int, int]
"""Height and width, in pixels."""


def resize_images(images: NDArray[np.uint8], size: Size) -> NDArray[np.uint8]:
    """Return images at another size, bilinear with antialiasing (Pillow's), as a new array.

    Args:
        images: ``(..., height, width, channels)``; channels do not influence each other.
        size: New height and width.
    """
    from PIL import Image

    channels = images.shape[-1]
    if channels not in (1, 3):  # Pillow would weight the colours of RGBA by its alpha
        parts = [resize_images(images[..., [at]], size) for at in range(channels)]
        return np.concatenate(parts, -1)
    resized = np.empty((*images.shape[:-3], *size, channels), np.uint8)
    sources = images.reshape(-1, *images.shape[-3:])
    for source, target in zip(sources, resized.reshape(-1, *size, channels), strict=True):
        image = Image.fromarray(source[..., 0] if channels == 1 else source)
        target[...] = np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR)).reshape(
            target.shape
        )
    return resized
