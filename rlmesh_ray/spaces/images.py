"""Image leaves of a space, and how their pixels are resized, compressed and decompressed.

An image leaf is a uint8 Box with bounds 0 and 255 and shape ``(*stack, height, width, channels)``,
where channels are 1, 3 or 4. Each image of a stack is a separate file. Pillow is imported when
the first image is processed: a program without images does not wait for it.
"""

import io
import math
import operator
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import ConfigurationError, ConformanceError
from rlmesh_ray.spaces.spec import BoxSpec, Leaf, SpaceSpec, leaves, with_leaves

Size = tuple[int, int]
"""Height and width, in pixels."""
Resize = Size | Mapping[str, Size]
"""Size of all image leaves, or sizes by the leaves' names."""


class ImageOptions(NamedTuple):
    """How a client wants the images of an environment; see ``RemoteEnv``."""

    image_codec: str | None = None
    resize: Resize | None = None

    @property
    def names(self) -> str:
        """The options that are given, for messages; empty: images travel unchanged."""
        return " and ".join(name for name, option in self._asdict().items() if option is not None)


AS_THEY_ARE = ImageOptions()


DEFAULT_QUALITY = 95
"""Of JPEG."""
_MAX_SIDE = 16383
"""Most pixels of a side in WebP; JPEG takes 65535."""
_CHANNELS = {"jpeg": (1, 3), "png": (1, 3, 4), "webp": (3,)}
FORMATS = tuple(_CHANNELS)
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_PNG_COLOURS = {1: 0, 3: 2, 4: 6}
# A file of noise is larger than its pixels, and one of few pixels is mostly header.
_FILE_BYTES, _FILE_SHARE = 2048, 1.25
_PNG_REFUSED = {b"acTL", b"iCCP", b"iTXt", b"zTXt"}
"""Chunks for animations, and those that inflate to more than the pixels."""


@dataclass(frozen=True, slots=True)
class ImageCodec:
    """Format of compressed images."""

    format: str
    """One of ``FORMATS``."""
    quality: int = 0
    """1 to 100; 0: lossless."""

    @classmethod
    def from_option(cls, option: object) -> Self:
        """Return the codec of an option such as ``"jpeg:95"``; raises ConfigurationError."""
        text = option if isinstance(option, str) else ""
        found = re.fullmatch(r"(jpeg|png|webp)(?::(\d{1,3}))?", text)
        quality = int(found[2] or 0) if found else 0
        if not found or (found[2] and (found[1] == "png" or not 1 <= quality <= 100)):
            raise ConfigurationError(
                f"image_codec={option!r:.40} is not known: give 'jpeg' or 'jpeg:QUALITY' (1 to "
                f"100, {DEFAULT_QUALITY} by default), 'webp:QUALITY', or 'png' or 'webp', which "
                "are lossless"
            )
        if found[1] == "jpeg":
            quality = quality or DEFAULT_QUALITY
        return cls(found[1], quality)

    def encode(self, frames: NDArray[np.uint8]) -> list[bytes]:
        """Return a file for each image of ``(num_images, height, width, channels)``."""
        from PIL import Image

        # The fast settings of each format; others gain little and take several times as long.
        settings: dict[str, Any] = {"quality": self.quality}
        if self.format == "png":
            settings = {"compress_level": 1}
        elif self.format == "webp":
            settings |= {"method": 0, "lossless": not self.quality}
        files = [io.BytesIO() for _ in frames]
        for frame, file in zip(frames, files, strict=True):
            Image.fromarray(_bands(frame)).save(file, self.format, **settings)
        return [file.getvalue() for file in files]


def obstacle(leaf: Leaf) -> str:
    """Return why a leaf is not an image leaf, as the end of a sentence; empty if it is one."""
    spec, shape = leaf.spec, leaf.shape
    if not isinstance(spec, BoxSpec) or spec.dtype != "uint8":
        dtype = "text" if leaf.dtype is None else leaf.dtype
        return f"is a {type(spec).__name__.removesuffix('Spec')} of {dtype}, not a Box of uint8"
    if spec.low != b"\x00" or spec.high != b"\xff":
        return "has other bounds than 0 and 255"
    if len(shape) < 3 or shape[-1] not in _MODES:
        return f"has shape {shape}, not (..., height, width, channels) with 1, 3 or 4 channels"
    if min(shape) < 1 or max(shape[-3:-1]) > _MAX_SIDE:
        return f"has shape {shape}, and sides are 1 to {_MAX_SIDE} pixels"
    return ""


def image_leaves(spec: SpaceSpec) -> list[Leaf]:
    return [leaf for leaf in leaves(spec) if not obstacle(leaf)]


def require_images(option: str, spec: SpaceSpec) -> list[Leaf]:
    """Return the image leaves of a space; raises ConfigurationError if ``option`` finds none."""
    found = image_leaves(spec)
    if not found:
        reasons = [f"{named(leaf)} {obstacle(leaf)}" for leaf in leaves(spec)[:8]]
        raise ConfigurationError(
            f"{option} needs an image, and the observation space has none "
            f"({'; '.join(reasons)}): leave it out"
        )
    return found


def require_codec(codec: ImageCodec, spec: SpaceSpec) -> list[Leaf]:
    found = require_images(f"image_codec={codec.format!r}", spec)
    for leaf in found:
        if leaf.shape[-1] not in _CHANNELS[codec.format]:
            raise ConfigurationError(
                f"image_codec={codec.format!r} does not fit {named(leaf)}, which has "
                f"{leaf.shape[-1]} channels: use image_codec='png', which takes 1, 3 or 4"
            )
    return found


def as_sizes(resize: object, spec: SpaceSpec) -> dict[str, Size]:
    """Return the sizes that a ``Resize`` gives to images, by name; raises ConfigurationError."""
    if not isinstance(resize, Mapping):
        size = _as_size(resize)
        return {leaf.name: size for leaf in require_images("resize", spec)}
    if not resize:
        raise ConfigurationError("resize={} names no image: leave it out, or name one")
    by_name = {leaf.name: leaf for leaf in leaves(spec)}
    sizes = {}
    for name, size in resize.items():
        if name not in by_name:
            names = ", ".join(map(repr, by_name))
            raise ConfigurationError(
                f"resize={{{name!r}: ...}} names no leaf of the observation space: it has {names}"
            )
        problem = obstacle(by_name[name])
        if problem:
            raise ConfigurationError(f"resize={{{name!r}: ...}} is not an image: it {problem}")
        sizes[name] = _as_size(size)
    return sizes


def resized_space(spec: SpaceSpec, sizes: Mapping[str, Size]) -> SpaceSpec:
    return with_leaves(
        spec,
        [
            replace(leaf.spec, shape=(*leaf.shape[:-3], *sizes[leaf.name], leaf.shape[-1]))
            if leaf.name in sizes and isinstance(leaf.spec, BoxSpec)
            else leaf.spec
            for leaf in leaves(spec)
        ],
    )


def resize_images(images: NDArray[np.uint8], size: Size) -> NDArray[np.uint8]:
    """Return images at another size, bilinear with antialiasing (Pillow's), as a new array.

    They are ``(..., height, width, channels)``; channels do not influence each other.
    """
    from PIL import Image

    channels = images.shape[-1]
    if channels not in (1, 3):  # Pillow would weight the colours of RGBA by its alpha
        parts = [resize_images(images[..., [at]], size) for at in range(channels)]
        return np.concatenate(parts, -1)
    resized = np.empty((*images.shape[:-3], *size, channels), np.uint8)
    sources = images.reshape(-1, *images.shape[-3:])
    for source, target in zip(sources, resized.reshape(-1, *size, channels), strict=True):
        image = Image.fromarray(_bands(source)).resize(size[::-1], Image.Resampling.BILINEAR)
        target[...] = np.asarray(image).reshape(target.shape)
    return resized


def decode_images(
    format_: str, leaf: Leaf, files: Sequence[bytes], num_lanes: int
) -> NDArray[np.uint8]:
    """Return the column of an image leaf from a peer's files, which are in the order of lanes.

    Sizes and modes are checked before pixels are decoded. ConformanceError names the leaf and the
    row: there are more or fewer files than images, or one is not a single image of the leaf's size.
    """
    shape = leaf.shape[-3:]
    column = np.empty((num_lanes, *leaf.shape), np.uint8)
    frames = column.reshape(-1, *shape)
    if len(files) != len(frames):
        reason = f"has {len(files)} images, expected {len(frames)} in {num_lanes} rows"
        raise ConformanceError("structure", leaf.name, reason)
    for at, (frame, data) in enumerate(zip(frames, files, strict=True)):
        try:
            _check_file(format_, data, shape)
            _decode(format_, data, frame)
        except Exception as error:
            # Pillow raises almost any exception for a damaged file.
            lane = at * num_lanes // len(frames)
            height, width, channels = shape
            reason = (
                f"row {lane} is not a {format_} image of {width}x{height} {_MODES[channels]} "
                f"({str(error)[:200] or type(error).__name__})"
            )
            raise ConformanceError("structure", leaf.name, reason, lane) from error
    return column


def max_file_bytes(shape: Sequence[int]) -> int:
    return int(math.prod(shape) * _FILE_SHARE) + _FILE_BYTES


def _decode(format_: str, data: bytes, frame: NDArray[np.uint8]) -> None:
    from PIL import Image, UnidentifiedImageError

    height, width, channels = frame.shape
    try:
        image = Image.open(io.BytesIO(data), formats=(format_.upper(),))
    except UnidentifiedImageError:  # its text has an address in memory
        raise ValueError("it is in another format, or damaged") from None
    with image:
        num_frames = getattr(image, "n_frames", 1)
        if (*image.size, image.mode, num_frames) != (width, height, _MODES[channels], 1):
            found = f"{image.size[0]}x{image.size[1]} {image.mode}"
            raise ValueError(f"it is {found}, {num_frames} frames")
        frame[...] = np.asarray(image).reshape(frame.shape)


def _check_file(format_: str, data: bytes, shape: Sequence[int]) -> None:
    """Raise ValueError for what Pillow would not refuse, or only after it has allocated memory."""
    if len(data) > max_file_bytes(shape):
        raise ValueError(f"it has {len(data)} bytes, {max_file_bytes(shape)} are the limit")
    if format_ == "jpeg":
        # Each scan takes the time of a whole image, and a few bytes.
        num_scans = data.count(b"\xff\xda")
        if num_scans != 1:
            raise ValueError(f"it has {num_scans} scans: encode it as a baseline JPEG")
    elif format_ == "png":
        _check_png(data, shape)
    else:
        _check_webp(data, shape)


def _check_png(data: bytes, shape: Sequence[int]) -> None:
    height, width, channels = shape
    header = struct.pack(
        ">I4sIIBBBBB", 13, b"IHDR", width, height, 8, _PNG_COLOURS[channels], *3 * b"\0"
    )
    if data[:8] != b"\x89PNG\r\n\x1a\n" or data[8:29] != header:
        raise ValueError("its header has another size, depth or colour, or is interlaced")
    at = 8
    while at + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        if kind in _PNG_REFUSED:
            raise ValueError(f"it has a chunk {kind.decode()}")
        at += size + 12


def _check_webp(data: bytes, shape: Sequence[int]) -> None:
    # Pillow allocates what the header says when it opens the file.
    height, width, _ = shape
    size = (0, 0)
    if len(data) > 30 and data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        if data[12:16] == b"VP8 ":
            size = tuple(each & 0x3FFF for each in struct.unpack_from("<HH", data, 26))
        elif data[12:16] == b"VP8L":
            bits = int.from_bytes(data[21:25], "little")
            size = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if size != (width, height):
        raise ValueError("its header has another size, or is not that of a simple WebP file")


def _bands(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return ``(height, width)`` for an image of one channel, as Pillow takes it."""
    return frame[..., 0] if frame.shape[-1] == 1 else frame


def _as_size(size: Any) -> Size:
    try:
        height, width = (0 if side is True else operator.index(side) for side in size)
    except (TypeError, ValueError):
        height = width = 0
    if not (1 <= height <= _MAX_SIDE and 1 <= width <= _MAX_SIDE):
        raise ConfigurationError(
            f"resize={size!r:.40} must be (height, width), each 1 to {_MAX_SIDE}, or a mapping of "
            "leaf names to such pairs"
        )
    return height, width


def named(leaf: Leaf) -> str:
    return repr(leaf.name) if leaf.path else "the observation"
