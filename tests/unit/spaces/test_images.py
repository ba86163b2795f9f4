import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray
from PIL import Image

from rlmesh_ray.errors import ConfigurationError, ConformanceError
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.images import (
    ImageCodec,
    as_sizes,
    decode_images,
    image_leaves,
    max_file_bytes,
    obstacle,
    require_codec,
    resize_images,
    resized_space,
)
from rlmesh_ray.spaces.spec import Leaf, SpaceSpec, leaves


def box(*shape: int, low: float = 0, high: float = 255, dtype: Any = np.uint8) -> spaces.Box:
    return spaces.Box(low, high, shape, dtype)


def spec_of(**parts: spaces.Space[Any]) -> SpaceSpec:
    return from_gymnasium(spaces.Dict(parts))


def leaf_of(*shape: int) -> Leaf:
    return leaves(from_gymnasium(box(*shape)))[0]


def noise(*shape: int) -> NDArray[np.uint8]:
    drawn: NDArray[np.uint8] = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    return drawn


def smooth(*shape: int) -> NDArray[np.uint8]:
    """Return images whose neighbouring pixels differ by little."""
    rows, columns = np.mgrid[: shape[-3], : shape[-2]]
    image: NDArray[Any] = 128 + 60 * np.sin(rows / 20) + 60 * np.cos(columns / 25)
    images: NDArray[np.uint8] = np.broadcast_to(image[..., None], shape).astype(np.uint8)
    return images


def saved(image: Image.Image, format_: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format_, **options)
    return file.getvalue()


def one(format_: str, data: bytes, *shape: int) -> NDArray[np.uint8]:
    (image,) = decode_images(format_, leaf_of(*shape), [data], 1)
    return np.asarray(image)


@pytest.mark.parametrize(
    ("space", "problem"),
    [
        (box(8, 8, 3, dtype=np.float32), "Box of float32"),
        (spaces.Discrete(3), "Discrete of int64"),
        (spaces.Text(3), "Text of text"),
        (box(8, 8, 3, high=1), "other bounds"),
        (box(84, 84), "shape"),
        (box(4, 84, 84), "shape"),
        (box(8, 8, 2), "shape"),
        (box(8, 20_000, 1), "sides"),
        (box(8, 8, 1), ""),
        (box(8, 8, 4), ""),
        (box(5, 2, 8, 8, 3), ""),
    ],
)
def test_a_leaf_is_an_image_by_its_dtype_bounds_and_shape(space: Any, problem: str) -> None:
    found = obstacle(leaves(from_gymnasium(space))[0])

    assert (problem in found) if problem else found == ""


@pytest.mark.parametrize(
    ("option", "codec"),
    [
        ("jpeg", ImageCodec("jpeg", 95)),
        ("jpeg:80", ImageCodec("jpeg", 80)),
        ("png", ImageCodec("png")),
        ("webp", ImageCodec("webp")),
        ("webp:100", ImageCodec("webp", 100)),
    ],
)
def test_an_option_names_format_and_quality(option: str, codec: ImageCodec) -> None:
    assert ImageCodec.from_option(option) == codec


@pytest.mark.parametrize(
    "option", ["", "gif", "jpeg:", "jpeg:0", "jpeg:101", "jpeg:9x", "png:1", "JPEG", None, 95]
)
def test_an_unknown_option_is_refused_with_the_known_ones(option: object) -> None:
    with pytest.raises(ConfigurationError, match=r"image_codec=.*jpeg:QUALITY.*png"):
        ImageCodec.from_option(option)


@pytest.mark.parametrize("codec", ["png", "webp"])
@pytest.mark.parametrize("shape", [(33, 47, 3), (2, 3, 16, 9, 3), (1, 1, 3)])
def test_lossless_codecs_return_the_same_pixels(codec: str, shape: tuple[int, ...]) -> None:
    column = noise(2, *shape)

    files = ImageCodec.from_option(codec).encode(column.reshape(-1, *shape[-3:]))

    np.testing.assert_array_equal(decode_images(codec, leaf_of(*shape), files, 2), column)


@pytest.mark.parametrize("channels", [1, 4])
def test_png_keeps_grey_images_and_four_channels(channels: int) -> None:
    column = noise(3, 21, 13, channels)

    files = ImageCodec("png").encode(column)

    np.testing.assert_array_equal(decode_images("png", leaf_of(21, 13, channels), files, 3), column)


@pytest.mark.parametrize(
    ("codec", "channels"), [("jpeg:95", 1), ("jpeg:95", 3), ("webp:90", 3), ("jpeg:50", 3)]
)
def test_lossy_codecs_change_smooth_pictures_by_little(codec: str, channels: int) -> None:
    column = smooth(2, 96, 128, channels)
    chosen = ImageCodec.from_option(codec)

    files = chosen.encode(column)
    decoded = decode_images(chosen.format, leaf_of(96, 128, channels), files, 2)

    assert np.abs(decoded.astype(int) - column).max() <= 12
    assert sum(map(len, files)) < column.nbytes / 5


@pytest.mark.parametrize("codec", ["jpeg:100", "jpeg:1", "png", "webp", "webp:100"])
@pytest.mark.parametrize("side", [1, 3, 64, 200])
def test_a_file_of_noise_is_within_the_limit(codec: str, side: int) -> None:
    (file,) = ImageCodec.from_option(codec).encode(noise(1, side, side, 3))

    assert len(file) <= max_file_bytes((side, side, 3))


def test_a_codec_refuses_channels_that_its_format_has_not() -> None:
    spec = spec_of(camera=box(8, 8, 3), stack=box(84, 84, 4))

    assert [leaf.name for leaf in require_codec(ImageCodec("png"), spec)] == ["camera", "stack"]
    for codec in (ImageCodec("jpeg", 95), ImageCodec("webp")):
        with pytest.raises(ConfigurationError, match=r"'stack', which has 4 .*image_codec='png'"):
            require_codec(codec, spec)


def test_a_codec_refuses_a_space_without_images_and_says_why() -> None:
    with pytest.raises(ConfigurationError, match=r"'a' is a Box of float32.*'b' has shape"):
        require_codec(ImageCodec("png"), spec_of(a=box(2, dtype=np.float32), b=box(84, 84)))


def test_sizes_are_for_all_images_or_by_leaf() -> None:
    spec = spec_of(a=box(8, 8, 3), b=spaces.Tuple([box(4, 9, 9, 1)]), c=spaces.Discrete(2))

    assert as_sizes((4, 5), spec) == {"a": (4, 5), "b.0": (4, 5)}
    assert as_sizes({"b.0": [np.int64(3), 2]}, spec) == {"b.0": (3, 2)}
    resized = resized_space(spec, {"b.0": (3, 2)})
    assert [leaf.shape for leaf in leaves(resized)] == [(8, 8, 3), (4, 3, 2, 1), ()]
    assert len(image_leaves(resized)) == 2


def test_sizes_for_an_image_that_is_the_whole_space() -> None:
    spec = from_gymnasium(box(8, 8, 3))

    assert resized_space(spec, as_sizes((2, 4), spec)) == from_gymnasium(box(2, 4, 3))


@pytest.mark.parametrize(
    ("resize", "message"),
    [
        ({"wrist": (4, 4)}, r"names no leaf.*'camera', 'joints'"),
        ({"joints": (4, 4)}, r"is not an image: it is a Box of float32"),
        ({}, r"names no image: leave it out"),
        ((4,), r"must be \(height, width\)"),
        ((True, 4), r"must be \(height, width\)"),
        ((0, 4), r"must be \(height, width\)"),
        ((4.0, 4), r"must be \(height, width\)"),
        (4, r"must be \(height, width\)"),
        ({"camera": (4, 99_999)}, r"must be \(height, width\)"),
    ],
)
def test_impossible_sizes_are_refused(resize: object, message: str) -> None:
    spec = spec_of(camera=box(8, 8, 3), joints=box(7, dtype=np.float32))

    with pytest.raises(ConfigurationError, match=message):
        as_sizes(resize, spec)


def test_a_resize_needs_an_image() -> None:
    with pytest.raises(ConfigurationError, match=r"resize needs an image.*Box of float32"):
        as_sizes((4, 4), from_gymnasium(box(7, dtype=np.float32)))


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 9])
def test_resizing_keeps_the_channels_apart(channels: int) -> None:
    images = noise(2, 3, 24, 32, channels)

    resized = resize_images(images, (12, 10))

    assert resized.shape == (2, 3, 12, 10, channels)
    for channel in range(channels):
        alone = resize_images(images[..., [channel]], (12, 10))
        np.testing.assert_array_equal(resized[..., [channel]], alone)


def test_resizing_to_half_takes_neighbours_into_account() -> None:
    stripes = np.zeros((8, 8, 3), np.uint8)
    stripes[:, ::2] = 255

    halved = resize_images(stripes, (4, 4))

    assert np.abs(halved.astype(int) - 128).max() < 40


def test_the_same_size_changes_nothing() -> None:
    images = noise(2, 7, 5, 3)

    np.testing.assert_array_equal(resize_images(images, (7, 5)), images)


@pytest.mark.parametrize("format_", ["jpeg", "png", "webp"])
def test_a_file_of_another_size_mode_or_format_is_refused(format_: str) -> None:
    right = Image.fromarray(smooth(16, 24, 3))
    wrong = {
        "size": saved(right.resize((16, 24)), format_),
        "mode": saved(right.convert("CMYK" if format_ == "jpeg" else "RGBA"), format_),
        "format": saved(right, "PNG" if format_ == "jpeg" else "JPEG"),
        "gif": saved(right, "GIF"),
        "empty": b"",
        "text": b"\x89PNG",
    }
    if format_ == "webp":
        wrong["mode"] = saved(Image.new("RGBA", (24, 16), (1, 2, 3, 4)), format_)

    for data in wrong.values():
        with pytest.raises(ConformanceError, match=rf"row 0 is not a {format_} image of 24x16 RGB"):
            one(format_, data, 16, 24, 3)


def test_the_error_names_the_leaf_and_the_row() -> None:
    leaf = leaves(spec_of(camera=box(2, 8, 8, 3)))[0]
    files = ImageCodec("png").encode(noise(6, 8, 8, 3))
    files[3] = files[3][:60]

    with pytest.raises(
        ConformanceError, match=r"camera: row 1 is not a png image of 8x8 RGB"
    ) as raised:
        decode_images("png", leaf, files, 3)

    assert raised.value.lane == 1


def test_other_numbers_of_files_are_refused() -> None:
    with pytest.raises(ConformanceError, match="has 1 images, expected 2 in 2 rows"):
        decode_images("png", leaf_of(8, 8, 3), [b""], 2)


@pytest.mark.parametrize("format_", ["png", "webp"])
def test_animations_are_refused(format_: str) -> None:
    first, second = (Image.fromarray(noise(8, 8, 3)).rotate(turn) for turn in (0, 90))

    data = saved(first, format_, save_all=True, append_images=[second])

    with pytest.raises(ConformanceError, match="row 0"):
        one(format_, data, 8, 8, 3)


def test_jpegs_of_many_scans_are_refused() -> None:
    data = saved(Image.fromarray(smooth(64, 64, 3)), "JPEG", progressive=True)

    with pytest.raises(ConformanceError, match=r"has \d+ scans: encode it as a baseline JPEG"):
        one("jpeg", data, 64, 64, 3)


def test_pngs_with_compressed_texts_are_refused() -> None:
    text = b"bomb\0\0" + zlib.compress(bytes(2**20))
    chunk = struct.pack(">I", len(text)) + b"zTXt" + text
    chunk += struct.pack(">I", zlib.crc32(b"zTXt" + text))
    data = saved(Image.fromarray(noise(64, 64, 3)), "PNG")

    with pytest.raises(ConformanceError, match="chunk zTXt"):
        one("png", data[:-12] + chunk + data[-12:], 64, 64, 3)


@pytest.mark.parametrize("format_", ["jpeg", "png", "webp"])
def test_bombs_are_refused_before_their_pixels_are_decoded(
    format_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = saved(Image.new("RGB", (4000, 4000)), format_)
    monkeypatch.setattr(Image.Image, "load", None)  # a file that is loaded would fail otherwise

    with pytest.raises(ConformanceError, match=r"bytes, 2108 are the limit"):
        one(format_, bomb, 4, 4, 3)
    with pytest.raises(ConformanceError, match=r"header has another size|it is 4000x4000"):
        one(format_, bomb, 400, 400, 3)


@pytest.mark.parametrize("format_", ["jpeg", "png", "webp"])
def test_damaged_files_raise_nothing_but_conformance_errors(format_: str) -> None:
    rng = np.random.default_rng(7)
    sound = [
        codec.encode(picture(1, 16, 16, 3))[0]
        for codec in (ImageCodec(format_, 90 if format_ == "jpeg" else 0),)
        for picture in (smooth, noise)
    ]
    num_refused = 0

    for _ in range(700):
        data = bytearray(sound[rng.integers(2)])
        for at in rng.integers(0, len(data), rng.integers(1, 6)):
            data[at] = rng.integers(256)
        if rng.random() < 0.3:
            del data[rng.integers(len(data)) :]
        if rng.random() < 0.2:
            data += rng.bytes(int(rng.integers(1, 40)))
        try:
            assert one(format_, bytes(data), 16, 16, 3).shape == (16, 16, 3)
        except ConformanceError:
            num_refused += 1

    assert num_refused > 100
