"""Batches whose images are compressed: the capability ``rlmesh_ray.image_codec.v1``.

The pixels of an image leaf (``spaces.images``) are replaced by files: for each image of a lane the
size of its file as a little-endian uint32, and the file. That is the ``tensor`` of the lane's node;
where the whole space is an image, the lanes follow one another. All other leaves are as
``rlmesh_v1.values`` has them.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache

from rlmesh_ray.errors import (
    CodecError,
    ConfigurationError,
    ConformanceError,
    ContractMismatchError,
)
from rlmesh_ray.protocol.capabilities import IMAGE_CODEC
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.images import (
    FORMATS,
    ImageCodec,
    decode_images,
    image_leaves,
    require_codec,
)
from rlmesh_ray.spaces.leaves import Column, Leaf, leaves
from rlmesh_ray.spaces.spec import DictSpec, SpaceSpec, TupleSpec
from rlmesh_ray.wire.batch_codec import BatchCodec, join_each, split_each
from rlmesh_ray.wire.rlmesh_v1 import values
from rlmesh_ray.wire.validation import check_column

MAX_PIXEL_BYTES = 2**28
"""Most bytes of pixels in a batch: a small file may be a large image."""
OFFER = ",".join(FORMATS)
"""Value of the capability of a server that takes all formats."""

_SIZE = struct.Struct("<I")


def require_offer(codec: ImageCodec, offered: Mapping[str, str], address: str) -> None:
    """Require that a server takes a format.

    Args:
        codec: Has the format.
        offered: The server's capabilities.
        address: The server's.

    Raises:
        ConfigurationError: It does not.
    """
    formats = offered.get(IMAGE_CODEC, "")
    if codec.format not in formats.split(","):
        offer = f"offers {formats.replace(',', ', ')}" if formats else "offers none"
        raise ConfigurationError(
            f"image_codec={codec.format!r} needs an endpoint that takes such images, and {address} "
            f"{offer} ({IMAGE_CODEC}): leave image_codec out, or serve with a newer rlmesh-ray"
        )


def require_room(spec: SpaceSpec, num_lanes: int) -> None:
    """Require that a batch has no more pixels than may be decompressed.

    Raises:
        ConfigurationError: It has more.
    """
    pixel_bytes = num_lanes * sum(leaf.lane_bytes for leaf in image_leaves(spec))
    if pixel_bytes > MAX_PIXEL_BYTES:
        raise ConfigurationError(
            f"{num_lanes} lanes have {pixel_bytes} bytes of pixels, and {MAX_PIXEL_BYTES} are the "
            "limit with image_codec: use fewer lanes, a smaller resize, or no image_codec"
        )


def codec_of(option: object, contract: EnvContract) -> ImageCodec:
    """Return the codec that an option names for the observations of an environment.

    Raises:
        ConfigurationError: It names none, or one that does not fit the contract.
    """
    codec = ImageCodec.from_option(option)
    require_codec(codec, contract.observation_space)
    require_room(contract.observation_space, contract.num_envs)
    return codec


class ImageBatchCodec:
    """Codec of the batches of a space, with compressed images.

    Args:
        spec: Space of one lane, with at least one image leaf.
        codec: Compresses images; of a reader, only its format matters.
    """

    def __init__(self, spec: SpaceSpec, codec: ImageCodec) -> None:
        self._spec = spec
        self._codec = codec
        self._leaves = leaves(spec)
        self._images = frozenset(leaf.path for leaf in image_leaves(spec))
        self._is_root = not isinstance(spec, (DictSpec, TupleSpec))

    def encode(self, columns: Sequence[Column], num_lanes: int) -> bytes:
        """Return the bytes of a batch."""
        by_leaf = []
        for leaf, column in zip(self._leaves, columns, strict=True):
            check_column(leaf, column, num_lanes)
            is_image = leaf.path in self._images
            by_leaf.append((self._files if is_image else values.node_values)(leaf, column))
        if self._is_root:
            return b"".join(by_leaf[0])
        return values.encode_nodes(self._spec, by_leaf, num_lanes)

    def decode(self, data: bytes, num_lanes: int) -> list[Column]:
        """Return the columns of a batch."""
        if self._is_root:
            return [self._pixels(self._leaves[0], [data], num_lanes)]
        parts = values.decode_nodes(self._spec, data, num_lanes)
        return [
            self._pixels(leaf, lanes, num_lanes)
            if leaf.path in self._images
            else values.column_of(leaf, lanes)
            for leaf, lanes in zip(self._leaves, parts, strict=True)
        ]

    def join(self, batches: Sequence[bytes], counts: Sequence[int]) -> list[Column]:
        """Decode several batches into the columns of one."""
        if len(counts) > 1:
            try:
                require_room(self._spec, sum(counts))
            except ConfigurationError as error:  # each alone is within the limit
                raise CodecError(str(error)) from error
        return join_each([self] * len(batches), batches, counts)

    def split(self, columns: Sequence[Column], counts: Sequence[int]) -> list[bytes]:
        """Encode one batch as several."""
        return split_each([self] * len(counts), columns, counts)

    def _files(self, leaf: Leaf, column: Column) -> list[bytes]:
        """Return the images of each lane as files."""
        assert not isinstance(column, tuple)
        files = self._codec.encode(column.reshape(-1, *leaf.shape[-3:]))
        sized = [part for file in files for part in (_SIZE.pack(len(file)), file)]
        step = len(sized) // len(column)
        return [b"".join(sized[at : at + step]) for at in range(0, len(sized), step)]

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


class _ReadingCodec:
    """Reads batches with compressed images, and writes batches of plain pixels.

    A policy's actions are never compressed, although their space may have an image, or be equal to
    that of the observations.
    """

    def __init__(self, spec: SpaceSpec, codec: ImageCodec) -> None:
        images, plain = ImageBatchCodec(spec, codec), values.codec(spec)
        self.decode, self.join = images.decode, images.join
        self.encode, self.split = plain.encode, plain.split


class CompressedObservations:
    """The value encoding of routes whose observations have compressed images.

    Args:
        format_: Format of the images.
    """

    def __init__(self, format_: str) -> None:
        self._codec = ImageCodec(format_)

    def codec(self, spec: SpaceSpec) -> BatchCodec:
        """Return the codec for the batches of a space."""
        return _ReadingCodec(spec, self._codec) if image_leaves(spec) else values.codec(spec)


# The same object for all routes: batches of one encoding are joined sooner.
_compressed = lru_cache(CompressedObservations)


def observation_codec(contract: EnvContract) -> BatchCodec:
    """Return the codec with which the client of a route encodes its observations.

    Args:
        contract: Contract of the route, as ``observations_of`` accepts it.
    """
    option = contract.metadata.get(IMAGE_CODEC)
    if option is None:
        return values.codec(contract.observation_space)
    return _image_codec(contract.observation_space, str(option))


@lru_cache
def _image_codec(spec: SpaceSpec, option: str) -> BatchCodec:
    return ImageBatchCodec(spec, ImageCodec.from_option(option))


def observations_of(contract: EnvContract) -> CompressedObservations | None:
    """Return the value encoding that a route's contract names; None: pixels are not compressed.

    Raises:
        ContractMismatchError: It is not possible with the contract's observation space.
    """
    option = contract.metadata.get(IMAGE_CODEC)
    if option is None:
        return None
    try:
        return _compressed(codec_of(option, contract).format)
    except ConfigurationError as error:
        raise ContractMismatchError(f"{IMAGE_CODEC}: {error}") from error
