from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray.client.image_route import route_images
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol.capabilities import IMAGE_CODEC, POLICY
from rlmesh_ray.protocol.handshake import HandshakeResponse
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.images import resize_images
from rlmesh_ray.spaces.leaves import leaves
from rlmesh_ray.wire import policy_v1
from rlmesh_ray.wire.image_codec_v1 import SentImages

CAMERA = spaces.Box(0, 255, (48, 64, 3), np.uint8)
CONTRACT = EnvContract(
    id="Robot-v0",
    observation_space=from_gymnasium(
        spaces.Dict({"front": CAMERA, "wrist": CAMERA, "zone": spaces.Text(5)})
    ),
    action_space=from_gymnasium(spaces.Discrete(3)),
    num_envs=2,
    autoreset_mode=AutoresetMode.DISABLED,
    metadata={"fps": 30},
)


def route(
    image_codec: str | None = None, resize: object = None, sizes: Any = None, offered: str = "png"
) -> tuple[SentImages, EnvContract]:
    facts = policy_v1.pack(policy_v1.PolicyFacts(image_sizes=sizes or {}))
    answer = HandshakeResponse(
        compatible=True,
        generation="",
        min_generation="",
        server_version="",
        editions=(),
        capabilities={POLICY: facts, IMAGE_CODEC: offered},
    )
    return route_images(CONTRACT, image_codec, resize, answer, "here:1")


def shapes(of: tuple[SentImages, EnvContract]) -> list[tuple[int, ...]]:
    return [leaf.shape for leaf in leaves(of[1].observation_space)]


def test_the_contract_names_the_codec_beside_other_metadata() -> None:
    assert route("png")[1].metadata == {"fps": 30, IMAGE_CODEC: "png"}
    assert route(resize=(4, 4))[1].metadata == {"fps": 30}
    with pytest.raises(ConfigurationError, match="here:1 offers png"):
        route("webp")
    with pytest.raises(ConfigurationError, match=r"here:1 offers none .*leave image_codec out"):
        route("png", offered="")


def test_images_become_as_small_as_the_policys() -> None:
    assert shapes(route(resize="policy", sizes={"front": (24, 64)})) == [
        (24, 64, 3),
        (48, 64, 3),
        (),
    ]


@pytest.mark.parametrize("larger", [(49, 64), (48, 65), (20, 100)])
def test_images_do_not_grow_to_those_of_the_policy(larger: tuple[int, int]) -> None:
    found = shapes(route(resize="policy", sizes={"front": larger, "wrist": (8, 8)}))

    assert found == [(48, 64, 3), (8, 8, 3), ()]


def test_images_that_are_all_smaller_than_the_policys_stay_as_they_are() -> None:
    sizes = {"front": (96, 128), "wrist": (48, 128)}

    assert shapes(route(resize="policy", sizes=sizes)) == [(48, 64, 3), (48, 64, 3), ()]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, r"size of 'front', 'wrist', and the policy names no image"),
        ({"camera": (8, 8)}, r"the policy names 'camera': give resize=\(height, width\)"),
        ({"front": (0, 8)}, r"must be \(height, width\)"),
        ({"front": (8, -8)}, r"must be \(height, width\)"),
    ],
)
def test_sizes_that_the_policy_lacks_are_refused(sizes: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        route(resize="policy", sizes=sizes)


def test_only_the_named_images_are_resized() -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 48, 64, 3), np.uint8)

    sent, _ = route(resize={"wrist": (12, 16)})
    front, wrist, zone = sent.resized([images, images, ("a", "b")])

    assert front is images
    np.testing.assert_array_equal(wrist, resize_images(images, (12, 16)))
    assert zone == ("a", "b")
