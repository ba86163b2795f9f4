"""A model route whose images are resized, compressed, or both, before they are sent."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rlmesh_ray.client.model_handshake import policy_of
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol.capabilities import IMAGE_CODEC
from rlmesh_ray.protocol.handshake import HandshakeResponse
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.images import (
    Size,
    as_sizes,
    require_images,
    resize_images,
    resized_space,
)
from rlmesh_ray.spaces.leaves import Column, leaves
from rlmesh_ray.spaces.spec import SpaceSpec
from rlmesh_ray.spaces.validation import coerce_batch
from rlmesh_ray.wire.image_codec_v1 import ImageBatchCodec, codec_of, require_offer

EncodeColumns = Callable[[EnvContract, Sequence[Column], int], bytes]
"""Returns the bytes of observations, given the contract of their route and the number of rows."""


class ImageRoute:
    """Encodes the observations of one route.

    Args:
        contract: Contract of the environment.
        image_codec: See ``RemoteModel.configure_route``.
        resize: Likewise.
        answer: The endpoint's answer to the handshake.
        address: The endpoint's.
        encode: Encodes observations whose images are not compressed.

    Raises:
        ConfigurationError: An option does not fit the observation space or the endpoint.
    """

    def __init__(
        self,
        contract: EnvContract,
        image_codec: object,
        resize: object,
        answer: HandshakeResponse,
        address: str,
        encode: EncodeColumns,
    ) -> None:
        self._space = contract.observation_space
        sizes: dict[str, Size] = {}
        if isinstance(resize, str):
            sizes = _policy_sizes(resize, self._space, answer)
        elif resize is not None:
            sizes = as_sizes(resize, self._space)
        self._sizes = [sizes.get(leaf.name) for leaf in leaves(self._space)]
        space = resized_space(self._space, sizes)
        self.contract = replace(contract, observation_space=space)
        """The contract for the endpoint: with the images as they are sent."""
        self._encode_columns = encode
        self._codec: ImageBatchCodec | None = None
        if image_codec is not None:
            codec = codec_of(image_codec, self.contract)
            require_offer(codec, answer.capabilities, address)
            metadata = {**contract.metadata, IMAGE_CODEC: codec.format}
            self.contract = replace(self.contract, metadata=metadata)
            self._codec = ImageBatchCodec(space, codec)

    def encode(self, observation: Any, num_rows: int) -> bytes:
        """Return the bytes of a batch of observations of the environment.

        Raises:
            ConformanceError: It has the wrong structure or dtype.
        """
        columns = coerce_batch(self._space, observation, num_rows)
        columns = [
            column if size is None or isinstance(column, tuple) else resize_images(column, size)
            for column, size in zip(columns, self._sizes, strict=True)
        ]
        if self._codec is None:
            return self._encode_columns(self.contract, columns, num_rows)
        return self._codec.encode(columns, num_rows)


def _policy_sizes(resize: str, space: SpaceSpec, answer: HandshakeResponse) -> dict[str, Size]:
    """Return the sizes of the policy's images, for those image leaves that are larger."""
    if resize != "policy":
        raise ConfigurationError(
            f"resize={resize!r:.40} must be 'policy', (height, width), or a mapping of leaf names "
            "to such pairs"
        )
    found = require_images("resize='policy'", space)
    sizes = policy_of(answer).image_sizes
    common = [leaf for leaf in found if leaf.name in sizes]
    if not common:
        names = ", ".join(repr(leaf.name) for leaf in found)
        theirs = ", ".join(map(repr, sizes)) or "no image"
        raise ConfigurationError(
            f"resize='policy' needs the size of {names}, and the policy names {theirs}: give "
            "resize=(height, width)"
        )
    return {
        leaf.name: sizes[leaf.name]
        for leaf in common
        if all(
            own >= wanted for own, wanted in zip(leaf.shape[-3:-1], sizes[leaf.name], strict=True)
        )
    }
