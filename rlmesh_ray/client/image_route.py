"""Model routes whose images are resized, compressed, or both, before they are sent."""

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
    named,
    require_images,
    resize_images,
    resized_space,
)
from rlmesh_ray.spaces.leaves import Column, leaves
from rlmesh_ray.spaces.spec import SpaceSpec
from rlmesh_ray.spaces.validation import coerce_batch
from rlmesh_ray.wire.image_codec_v1 import codec_of, require_offer


class ImageRoute:
    """The contract of one route, and its observations as they are sent.

    Args:
        contract: Contract of the environment.
        image_codec: See ``RemoteModel.configure_route``.
        resize: Likewise.
        answer: The endpoint's answer to the handshake.
        address: The endpoint's.

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
        if image_codec is not None:
            codec = codec_of(image_codec, self.contract)
            require_offer(codec, answer.capabilities, address)
            metadata = {**contract.metadata, IMAGE_CODEC: image_codec}
            self.contract = replace(self.contract, metadata=metadata)

    def columns(self, observation: Any, num_rows: int) -> list[Column]:
        """Return a batch of the environment's observations as columns, with resized images.

        Raises:
            ConformanceError: It has the wrong structure or dtype.
        """
        columns = coerce_batch(self._space, observation, num_rows)
        return [
            column if size is None or isinstance(column, tuple) else resize_images(column, size)
            for column, size in zip(columns, self._sizes, strict=True)
        ]


def _policy_sizes(resize: str, space: SpaceSpec, answer: HandshakeResponse) -> dict[str, Size]:
    """Return the sizes of the policy's images, for those image leaves that are larger."""
    if resize != "policy":
        raise ConfigurationError(
            f"resize={resize!r:.40} must be 'policy', (height, width), or a mapping of leaf names "
            "to such pairs"
        )
    found = require_images("resize='policy'", space)
    sizes = policy_of(answer).image_sizes
    if not any(leaf.name in sizes for leaf in found):
        names = ", ".join(map(named, found))
        theirs = ", ".join(map(repr, sizes)) or "no image"
        raise ConfigurationError(
            f"resize='policy' needs the size of {names}, and the policy names {theirs}: give "
            "resize=(height, width)"
        )
    smaller = {}
    for leaf in found:
        height, width = sizes.get(leaf.name, leaf.shape[-3:-1])
        if height <= leaf.shape[-3] and width <= leaf.shape[-2]:
            smaller[leaf.name] = height, width
    return as_sizes(smaller, space) if smaller else {}
