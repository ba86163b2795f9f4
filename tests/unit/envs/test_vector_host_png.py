import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rlmesh_ray.envs.vector_host import as_frames, encode_png
from rlmesh_ray.testing.equality import assert_identical


def frame(value: int) -> Any:
    return np.full((2, 3, 3), value, np.uint8)


def pixels(png: bytes) -> Any:
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        return np.array(image)


def test_one_frame_is_the_picture() -> None:
    assert (pixels(encode_png([frame(7)])) == frame(7)).all()


def test_several_frames_are_tiled_row_by_row() -> None:
    picture = pixels(encode_png([frame(1), frame(2), frame(3)]))

    assert picture.shape == (4, 6, 3)
    assert [picture[0, 0, 0], picture[0, 3, 0]] == [1, 2]
    assert [picture[2, 0, 0], picture[2, 3, 0]] == [3, 0]


@pytest.mark.parametrize(
    ("rendered", "count"),
    [
        (None, 0),
        (frame(1), 1),
        (np.stack([frame(1), frame(2)]), 2),
        ((frame(1), frame(2)), 2),
        ((frame(1), None), 1),
        ((None,), 0),
    ],
)
def test_frames_are_found_in_what_vectors_render(rendered: Any, count: int) -> None:
    frames = as_frames(rendered)

    assert [found.shape for found in frames] == [(2, 3, 3)] * count


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64, np.uint16, np.bool_])
def test_frames_of_another_dtype_keep_their_values(dtype: Any) -> None:
    given = frame(1).astype(dtype)

    (found,) = as_frames(given)

    assert_identical(found, frame(1))
    assert (pixels(encode_png([found])) == given).all()


@pytest.mark.parametrize(
    "rendered",
    [
        np.full((2, 3, 3), 0.5),
        np.full((2, 3, 3), np.nan),
        np.full((2, 3, 3), 256),
        np.full((2, 3, 3), -1),
        np.full((2, 3, 5), 1, np.uint8),
        np.full((2, 3, 3), 1j),
        [np.zeros(3, np.uint8)],
        ["text"],
    ],
)
def test_a_frame_that_is_not_a_picture_is_refused_with_the_remedy(rendered: Any) -> None:
    with pytest.raises(TypeError, match=r"not a picture: return \(height, width, 3\) uint8"):
        as_frames(rendered)
