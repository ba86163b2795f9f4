from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray.errors import CodecError, ConfigurationError, ContractMismatchError
from rlmesh_ray.protocol.capabilities import (
    IMAGE_CODEC,
    IMAGE_CODEC_METADATA_KEY,
    IMAGE_SIZES_METADATA_KEY,
)
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.images import ImageCodec, resized_space
from rlmesh_ray.spaces.spec import SpaceSpec
from rlmesh_ray.spaces.validation import coerce_batch
from rlmesh_ray.wire.image_codec_v1 import (
    ImageBatchCodec,
    images_asked_for,
    offer,
    require_offer,
    route_codecs,
    session_metadata,
)
from rlmesh_ray.wire.rlmesh_v1 import values

PNG = ImageCodec("png")
IMAGE = spaces.Box(0, 255, (6, 5, 3), np.uint8)
ROBOT = spaces.Dict(
    {
        "stack": spaces.Box(0, 255, (2, 4, 4, 1), np.uint8),
        "joints": spaces.Box(-1.0, 1.0, (7,), np.float32),
        "pair": spaces.Tuple([IMAGE, spaces.Discrete(5)]),
        "task": spaces.Text(9),
    }
)


def batch(space: spaces.Space[Any], num_lanes: int) -> tuple[SpaceSpec, list[Any]]:
    space.seed(3)
    batched = spaces.Dict({"x": space})
    samples = [batched.sample()["x"] for _ in range(num_lanes)]
    spec = from_gymnasium(space)
    if isinstance(space, spaces.Box):
        return spec, [np.stack(samples)]
    value = {
        "stack": np.stack([each["stack"] for each in samples]),
        "joints": np.stack([each["joints"] for each in samples]),
        "pair": (
            np.stack([each["pair"][0] for each in samples]),
            np.stack([each["pair"][1] for each in samples]),
        ),
        "task": [each["task"] for each in samples],
    }
    return spec, coerce_batch(spec, value, num_lanes)


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
        assert getattr(one, "dtype", None) == getattr(other, "dtype", None)


@pytest.mark.parametrize("space", [IMAGE, ROBOT])
@pytest.mark.parametrize("num_lanes", [1, 3])
def test_what_is_encoded_is_decoded(space: spaces.Space[Any], num_lanes: int) -> None:
    spec, columns = batch(space, num_lanes)
    codec = ImageBatchCodec(spec, PNG)

    data = codec.encode(columns, num_lanes)

    assert data != values.encode_batch(spec, columns, num_lanes)
    assert_same(codec.decode(data, num_lanes), columns)


@pytest.mark.parametrize("space", [IMAGE, ROBOT])
def test_batches_are_joined_and_split(space: spaces.Space[Any]) -> None:
    spec, columns = batch(space, 5)
    codec = ImageBatchCodec(spec, PNG)

    parts = codec.split(columns, [2, 3])

    assert_same(codec.decode(parts[0], 2), [column[:2] for column in columns])
    assert_same(codec.join(parts, [2, 3]), columns)


@pytest.mark.parametrize("space", [IMAGE, ROBOT])
def test_other_lanes_are_refused(space: spaces.Space[Any]) -> None:
    spec, columns = batch(space, 2)
    codec = ImageBatchCodec(spec, PNG)
    data = codec.encode(columns, 2)

    for num_lanes in (1, 3):
        with pytest.raises(CodecError, match=r"lanes, expected|are not \d images"):
            codec.decode(data, num_lanes)
        with pytest.raises(CodecError):
            codec.encode(columns, num_lanes)


def test_plain_pixels_are_refused() -> None:
    for space in (IMAGE, ROBOT):
        spec, columns = batch(space, 2)
        data = values.encode_batch(spec, columns, 2)

        with pytest.raises(CodecError, match="bytes are not"):
            ImageBatchCodec(spec, PNG).decode(data, 2)


def test_an_error_names_the_leaf_and_the_row() -> None:
    spec, columns = batch(ROBOT, 3)
    data = ImageBatchCodec(spec, PNG).encode(columns, 3)
    damaged = data.replace(b"\0\0\0\5\0\0\0\6\10", b"\0\0\0\5\0\0\0\7\10")

    with pytest.raises(CodecError, match=r"pair\.0: row 0 is not a png image of 5x6 RGB"):
        ImageBatchCodec(spec, PNG).decode(damaged, 3)


def test_damaged_batches_raise_nothing_but_codec_errors() -> None:
    rng = np.random.default_rng(11)
    num_refused = 0
    for space in (IMAGE, ROBOT):
        spec, columns = batch(space, 2)
        codec = ImageBatchCodec(spec, ImageCodec("png"))
        sound = codec.encode(columns, 2)
        for _ in range(300):
            data = bytearray(sound)
            for at in rng.integers(0, len(data), rng.integers(1, 4)):
                data[at] = rng.integers(256)
            if rng.random() < 0.3:
                del data[rng.integers(len(data)) :]
            try:
                codec.decode(bytes(data), 2)
            except CodecError:
                num_refused += 1

    assert num_refused > 100


def contract(space: spaces.Space[Any], **metadata: object) -> EnvContract:
    return EnvContract(
        id="Toy-v0",
        observation_space=from_gymnasium(space),
        action_space=from_gymnasium(spaces.Discrete(3)),
        num_envs=3,
        autoreset_mode=AutoresetMode.DISABLED,
        metadata=metadata,
    )


def test_a_contract_names_the_encoding_of_its_route() -> None:
    assert route_codecs(contract(ROBOT)).observations is values.codec(from_gymnasium(ROBOT))
    png = route_codecs(contract(ROBOT, **{IMAGE_CODEC: "png"}))
    assert isinstance(png.observations, ImageBatchCodec)
    # Equal, so that their requests are joined without a detour.
    assert route_codecs(contract(ROBOT, **{IMAGE_CODEC: "png"})) == png


def test_routes_of_any_quality_are_joined() -> None:
    jpeg = route_codecs(contract(ROBOT, **{IMAGE_CODEC: "jpeg:80"}))

    assert route_codecs(contract(ROBOT, **{IMAGE_CODEC: "jpeg:95"})) == jpeg


@pytest.mark.parametrize(
    ("space", "format_", "message"),
    [
        (ROBOT, "gif", "image_codec='gif' is not known"),
        (ROBOT, "png:9", "is not known"),
        (ROBOT, 7, "is not known"),
        (ROBOT, ["png"], "is not known"),
        (spaces.Box(0, 255, (8, 8, 4), np.uint8), "jpeg", "which has 4 channels"),
        (spaces.Discrete(3), "png", "needs an image"),
        (spaces.Box(0, 255, (2, 4700, 4700, 3), np.uint8), "png", "bytes of pixels"),
    ],
)
def test_an_impossible_encoding_is_refused(
    space: spaces.Space[Any], format_: object, message: str
) -> None:
    with pytest.raises(ContractMismatchError, match=message):
        route_codecs(contract(space, **{IMAGE_CODEC: format_}))


def test_actions_are_not_compressed_even_if_their_space_is_that_of_the_observations() -> None:
    spec, columns = batch(IMAGE, 3)
    route = replace(contract(IMAGE, **{IMAGE_CODEC: "png"}), action_space=spec)
    observations, actions = route_codecs(route)

    assert actions.split(columns, [1, 2]) == values.codec(spec).split(columns, [1, 2])
    assert actions.encode(columns, 3) == values.encode_batch(spec, columns, 3)
    assert_same(observations.join([ImageBatchCodec(spec, PNG).encode(columns, 3)], [3]), columns)


def test_batches_of_too_many_pixels_are_not_joined() -> None:
    spec = from_gymnasium(spaces.Box(0, 255, (5000, 5000, 3), np.uint8))

    with pytest.raises(CodecError, match="4 lanes have 300000000 bytes of pixels"):
        ImageBatchCodec(spec, PNG).join([b"", b""], [1, 3])


def test_a_server_must_offer_the_format() -> None:
    require_offer("image_codec='png'", "png", {IMAGE_CODEC: "jpeg,png"}, "here:1")

    for offered, what in (({}, "offers none"), ({IMAGE_CODEC: "jpeg"}, "offers jpeg")):
        with pytest.raises(ConfigurationError, match=rf"here:1 {what}.*leave image_codec out"):
            require_offer("image_codec='png'", "png", offered, "here:1")


def test_a_capability_is_offered_only_where_images_can_travel() -> None:
    assert offer(from_gymnasium(ROBOT)) == offer(None) == {IMAGE_CODEC: "jpeg,png,webp"}
    assert offer(from_gymnasium(IMAGE), resizes=True) == {IMAGE_CODEC: "jpeg,png,webp,resize"}
    assert offer(from_gymnasium(ROBOT["joints"]), resizes=True) == {}


def test_the_metadata_of_a_session_have_the_size_of_each_image() -> None:
    spec, sizes = from_gymnasium(ROBOT), {"stack": (2, 3)}
    metadata = session_metadata(spec, "png", sizes)

    assert metadata == ((IMAGE_CODEC_METADATA_KEY, "png"), (IMAGE_SIZES_METADATA_KEY, "6x5,2x3"))
    images = images_asked_for(dict(metadata), contract(ROBOT))
    assert images is not None
    assert (images.format, images.space) == ("png", resized_space(spec, sizes))
    assert images_asked_for({}, contract(ROBOT)) is None


@pytest.mark.parametrize("text", ["", "6x5", "6x5,2x3,1x1", "6x5,2x-3", "6x5,0x3", "6x5,2x99999"])
def test_sizes_that_are_none_or_not_one_an_image_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="resize="):
        images_asked_for({IMAGE_SIZES_METADATA_KEY: text}, contract(ROBOT))


def test_sizes_of_too_many_pixels_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"bytes of pixels.*smaller resize"):
        images_asked_for({IMAGE_SIZES_METADATA_KEY: "16000x16000"}, contract(IMAGE))


def test_lanes_that_put_their_last_observations_into_infos_are_not_resized() -> None:
    lanes = replace(contract(IMAGE), autoreset_mode=AutoresetMode.SAME_STEP)

    with pytest.raises(ConfigurationError, match="SAME_STEP puts into infos: leave it out, or"):
        images_asked_for({IMAGE_SIZES_METADATA_KEY: "3x2"}, lanes)


def test_metadata_of_another_kind_leave_the_contract_as_it_is() -> None:
    codecs = route_codecs(replace(contract(ROBOT), metadata={"fps": 30}))

    assert codecs == route_codecs(contract(ROBOT))


def test_a_format_that_the_endpoint_does_not_offer_is_refused() -> None:
    offered = {IMAGE_CODEC: "png"}

    require_offer("image_codec='png'", "png", offered, "here:1")
    with pytest.raises(ConfigurationError, match="here:1 offers png"):
        require_offer("image_codec='webp'", "webp", offered, "here:1")
    with pytest.raises(ConfigurationError, match=r"here:1 offers none .*leave image_codec out"):
        require_offer("image_codec='png'", "png", {}, "here:1")
