import numpy as np

from rlmesh_ray.spaces.spec import BoxSpec, MultiBinarySpec


def test_bounds_have_shape_and_dtype_of_the_box() -> None:
    low, high = np.array([[-1, 0]], np.int16), np.array([[5, 6]], np.int16)
    spec = BoxSpec((1, 2), "int16", low.tobytes(), high.tobytes())

    bounds = spec.bounds()

    for bound, expected in zip(bounds, (low, high), strict=True):
        assert bound.dtype == np.int16
        np.testing.assert_array_equal(bound, expected)
        assert not bound.flags.writeable


def test_a_box_shows_its_bounds_as_numbers() -> None:
    low, high = np.array([-1.5, 0.0], "<f4").tobytes(), np.array([np.inf] * 2, "<f4").tobytes()

    shown = repr(BoxSpec((2,), "float32", low, high))
    large = repr(BoxSpec((1000,), "int16", np.arange(1000, dtype="<i2").tobytes(), b"\x05\x00"))

    assert shown == "BoxSpec(shape=(2,), dtype='float32', low=[-1.5,  0. ], high=inf)"
    assert large.endswith("low=[  0,   1, ..., 998, 999], high=5)")


def test_a_multi_binary_of_a_size_has_one_axis() -> None:
    assert MultiBinarySpec(3).shape == (3,)
    assert MultiBinarySpec((2, 3)).shape == (2, 3)
