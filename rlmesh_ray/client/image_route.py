"""Model routes whose images are resized, compressed, or both, before they are sent."""

from dataclasses import replace

from rlmesh_ray.client.model_handshake import policy_of
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol.capabilities import IMAGE_CODEC
from rlmesh_ray.protocol.handshake import HandshakeResponse
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.images import Size, as_sizes, named, require_images
from rlmesh_ray.spaces.spec import SpaceSpec
from rlmesh_ray.wire.image_codec_v1 import SentImages, require_offer


def route_images(
    contract: EnvContract,
    image_codec: str | None,
    resize: object,
    answer: HandshakeResponse,
    address: str,
) -> tuple[SentImages, EnvContract]:
    """Return how the images of a route travel, and the contract for the endpoint, which says so.

    Args:
        contract: Contract of the environment.
        image_codec: See ``RemoteModel.configure_route``.
        resize: Likewise.
        answer: The endpoint's answer to the handshake.
        address: The endpoint's.

    Raises:
        ConfigurationError: An option does not fit the observation space or the endpoint.
    """
    space = contract.observation_space
    sizes: dict[str, Size] = {}
    if isinstance(resize, str):
        sizes = _policy_sizes(resize, space, answer)
    elif resize is not None:
        sizes = as_sizes(resize, space)
    images, metadata = SentImages(contract, image_codec, sizes), contract.metadata
    if image_codec is not None:
        require_offer(f"{image_codec=}", images.format, answer.capabilities, address)
        metadata = {**metadata, IMAGE_CODEC: image_codec}
    return images, replace(contract, observation_space=images.space, metadata=metadata)


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
