"""Batches whose images are compressed or resized: the capability ``rlmesh_ray.image_codec.v1``.

The pixels of an image leaf (``spaces.images``) are replaced by files: for each image of a lane the
size of its file as a little-endian uint32, and the file. That is the ``tensor`` of the lane's node;
where the whole space is an image, the lanes follow one another. All other leaves are as
``rlmesh_v1.values`` has them.
"""

import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from rlmesh_ray.errors import (
    CodecError,
    ConfigurationError,
    ConformanceError,
    ContractMismatchError,
)
from rlmesh_ray.protocol.capabilities import (
    IMAGE_CODEC,
    IMAGE_CODEC_METADATA_KEY,
    IMAGE_SIZES_METADATA_KEY,
    RESIZE,
)
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.images import (
    FORMATS,
    ImageCodec,
    Size,
    as_sizes,
    decode_images,
    image_leaves,
    require_codec,
    resize_images,
    resized_space,
)
from rlmesh_ray.spaces.spec import Column, DictSpec, Leaf, SpaceSpec, TupleSpec, leaves
from rlmesh_ray.wire.rlmesh_v1 import values
from rlmesh_ray.wire.rlmesh_v1.values import BatchCodec, ContractCodecs, NodeCodec, check_column

MAX_PIXEL_BYTES = 2**28
"""Most bytes of pixels in a batch: a small file may be a large image."""

_SIZE = struct.Struct("<I")


def offer(spec: SpaceSpec | None, *, resizes: bool = False) -> dict[str, str]:
    """Return a server's capability; none where it would be of no use.

    ``spec`` is the only space of the observations that travel; None: there may be others.
    """
    if spec is not None and not image_leaves(spec):
        return {}
    return {IMAGE_CODEC: ",".join((*FORMATS, RESIZE) if resizes else FORMATS)}


def require_offer(option: str, needed: str, offered: Mapping[str, str], address: str) -> None:
    """Raise ConfigurationError if a server lacks what ``option`` needs: a format or ``RESIZE``."""
    able = offered.get(IMAGE_CODEC, "")
    if needed and needed not in able.split(","):
        offers = f"offers {able.replace(',', ', ')}" if able else "offers none"
        raise ConfigurationError(
            f"{option} needs an endpoint with {needed} for images, and {address} {offers} "
            f"({IMAGE_CODEC}): leave {option.partition('=')[0]} out, or serve with a newer "
            "rlmesh-ray"
        )


def require_room(spec: SpaceSpec, num_lanes: int) -> None:
    """Raise ConfigurationError for a batch of more pixels than may be decompressed."""
    pixel_bytes = num_lanes * sum(leaf.lane_bytes for leaf in image_leaves(spec))
    if pixel_bytes > MAX_PIXEL_BYTES:
        raise ConfigurationError(
            f"{num_lanes} lanes have {pixel_bytes} bytes of pixels, and {MAX_PIXEL_BYTES} are the "
            "limit with image_codec or resize: use fewer lanes or a smaller resize, or neither"
        )


def codec_of(option: object, spec: SpaceSpec, num_lanes: int) -> ImageCodec:
    codec = ImageCodec.from_option(option)
    require_codec(codec, spec)
    require_room(spec, num_lanes)
    return codec


class ImageBatchCodec(NodeCodec):
    """Codec of a space with images, which are compressed; of a reader, only the format matters."""

    def __init__(self, spec: SpaceSpec, codec: ImageCodec) -> None:
        super().__init__(spec)
        self._codec = codec
        self._images = frozenset(leaf.path for leaf in image_leaves(spec))
        self._is_root = not isinstance(spec, (DictSpec, TupleSpec))

    def encode(self, columns: Sequence[Column], num_lanes: int) -> bytes:
        if not self._is_root:
            return super().encode(columns, num_lanes)
        check_column(self._leaves[0], columns[0], num_lanes)
        return b"".join(self.node_values(self._leaves[0], columns[0]))

    def decode(self, data: bytes, num_lanes: int) -> list[Column]:
        if not self._is_root:
            return super().decode(data, num_lanes)
        return [self._pixels(self._leaves[0], [data], num_lanes)]

    def join(self, batches: Sequence[bytes], counts: Sequence[int]) -> list[Column]:
        if len(counts) > 1:
            try:
                require_room(self._spec, sum(counts))
            except ConfigurationError as error:  # each alone is within the limit
                raise CodecError(str(error)) from error
        return super().join(batches, counts)

    def node_values(self, leaf: Leaf, column: Column) -> Sequence[Any]:
        if leaf.path not in self._images or isinstance(column, tuple):
            return super().node_values(leaf, column)
        files = self._codec.encode(column.reshape(-1, *leaf.shape[-3:]))
        sized = [part for file in files for part in (_SIZE.pack(len(file)), file)]
        step = len(sized) // len(column)
        return [b"".join(sized[at : at + step]) for at in range(0, len(sized), step)]

    def column(self, leaf: Leaf, lanes: list[Any]) -> Column:
        if leaf.path not in self._images:
            return super().column(leaf, lanes)
        return self._pixels(leaf, lanes, len(lanes))

    def _pixels(self, leaf: Leaf, lanes: Sequence[bytes], num_lanes: int) -> Column:
        num_images = math.prod(leaf.shape[:-3]) * (num_lanes if self._is_root else 1)
        files = [file for lane in lanes for file in _split_files(leaf, lane, num_images)]
        try:
            return decode_images(self._codec.format, leaf, files, num_lanes)
        except ConformanceError as error:
            raise CodecError(str(error.about("observation"))) from error


def _split_files(leaf: Leaf, data: bytes, num_images: int) -> list[bytes]:
    files: list[bytes] = []
    at = 0
    while at + _SIZE.size <= len(data) and len(files) < num_images:
        (size,) = _SIZE.unpack_from(data, at)
        at += _SIZE.size + size
        files.append(data[at - size : at])
    if at != len(data) or len(files) != num_images:
        raise CodecError(
            f"{leaf.name or 'observation'}: {len(data)} bytes are not {num_images} images, each "
            "after its size"
        )
    return files


@lru_cache
def _image_codec(spec: SpaceSpec, option: str) -> BatchCodec:
    # The same object for all routes: batches of one encoding are joined sooner.
    return ImageBatchCodec(spec, ImageCodec.from_option(option))


def observation_codec(contract: EnvContract) -> BatchCodec:
    """Return the codec with which the client of a route encodes its observations."""
    option = contract.metadata.get(IMAGE_CODEC)
    if option is None:
        return values.codec(contract.observation_space)
    return _image_codec(contract.observation_space, str(option))


def route_codecs(contract: EnvContract) -> ContractCodecs:
    """Return a server's codecs of a route; raises ContractMismatchError."""
    codecs = ContractCodecs.made_by(values.codec, contract)
    option = contract.metadata.get(IMAGE_CODEC)
    if option is None:
        return codecs
    try:
        images = codec_of(option, contract.observation_space, contract.num_envs)
    except ConfigurationError as error:
        raise ContractMismatchError(f"{IMAGE_CODEC}: {error}") from error
    # A reader needs no quality, so that the routes of any quality have one.
    return codecs._replace(observations=_image_codec(contract.observation_space, images.format))


class SentImages:
    """How an endpoint sends images: in new sizes by the leaves' names, then compressed."""

    def __init__(self, contract: EnvContract, codec: object, sizes: Mapping[str, Size]) -> None:
        space = contract.observation_space
        self._sizes = [sizes.get(leaf.name) for leaf in leaves(space)]
        self.space = resized_space(space, sizes)
        """The observation space of those that receive the images."""
        self.format = ""
        """Format of the images; empty: pixels are not compressed."""
        self.values: BatchCodec = values.codec(self.space)
        """Codec of the batches that travel."""
        if codec is not None:
            found = codec_of(codec, self.space, contract.num_envs)
            self.format, self.values = found.format, ImageBatchCodec(self.space, found)

    def resized(self, columns: Iterable[Column]) -> list[Column]:
        return [
            column if size is None or isinstance(column, tuple) else resize_images(column, size)
            for column, size in zip(columns, self._sizes, strict=True)
        ]


def session_images(contract: EnvContract, codec: object, sizes: Mapping[str, Size]) -> SentImages:
    """Return how the endpoint of an environment sends images, for both sides of a session."""
    images = SentImages(contract, codec, sizes)
    if sizes and contract.autoreset_mode is AutoresetMode.SAME_STEP:
        raise ConfigurationError(
            "resize does not reach the last observations of episodes, which autoreset mode "
            "SAME_STEP puts into infos: leave it out, or serve the environment in another mode"
        )
    require_room(images.space, contract.num_envs)
    return images


def session_metadata(
    spec: SpaceSpec, codec: str | None, sizes: Mapping[str, Size]
) -> tuple[tuple[str, str], ...]:
    found = () if codec is None else ((IMAGE_CODEC_METADATA_KEY, codec),)
    if not sizes:
        return found
    each = (sizes.get(leaf.name, leaf.shape[-3:-1]) for leaf in image_leaves(spec))
    text = ",".join(f"{height}x{width}" for height, width in each)
    return (*found, (IMAGE_SIZES_METADATA_KEY, text))


def images_asked_for(
    metadata: Mapping[str, str | bytes], contract: EnvContract
) -> SentImages | None:
    """Return what ``session_metadata`` ask for; None: images travel unchanged."""
    codec, text = map(metadata.get, (IMAGE_CODEC_METADATA_KEY, IMAGE_SIZES_METADATA_KEY))
    if codec is None and text is None:
        return None
    sizes: dict[str, Size] = {}
    if text is not None:
        found = [re.fullmatch(r"(\d{1,5})x(\d{1,5})", part) for part in str(text).split(",")]
        images = image_leaves(contract.observation_space)
        if not all(found) or len(found) != len(images):
            raise ConfigurationError(
                f"resize={text!r:.80} must be HEIGHTxWIDTH for each of the {len(images)} images"
            )
        named = zip(images, found, strict=True)
        given = {leaf.name: (int(size[1]), int(size[2])) for leaf, size in named if size}
        sizes = as_sizes(given, contract.observation_space)
    return session_images(contract, codec, sizes)
