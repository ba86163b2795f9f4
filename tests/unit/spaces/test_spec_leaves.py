import numpy as np
from gymnasium import spaces

from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.spec import leaves, path_name


def test_leaves_come_depth_first_in_the_order_of_the_spec() -> None:
    space = spaces.Dict(
        [
            ("z", spaces.Discrete(3)),
            ("a", spaces.Tuple([spaces.Text(2), spaces.Dict({"b": spaces.Box(0, 1, (2,))})])),
        ]
    )

    found = leaves(from_gymnasium(space))

    assert [leaf.path for leaf in found] == [("z",), ("a", 0), ("a", 1, "b")]
    assert [leaf.name for leaf in found] == ["z", "a.0", "a.1.b"]


def test_a_leaf_knows_shape_dtype_and_size_of_one_lane() -> None:
    space = spaces.Tuple(
        [
            spaces.Box(0, 1, (2, 3), np.float32),
            spaces.Discrete(3, dtype=np.uint8),
            spaces.MultiBinary([4, 2]),
            spaces.MultiDiscrete([3, 4], np.int16),
            spaces.Text(5),
        ]
    )

    found = leaves(from_gymnasium(space))

    assert [leaf.shape for leaf in found] == [(2, 3), (), (4, 2), (2,), ()]
    assert [leaf.dtype for leaf in found] == ["float32", "uint8", "int8", "int16", None]
    assert [leaf.lane_bytes for leaf in found] == [24, 1, 8, 4, 0]


def test_a_root_has_an_empty_name() -> None:
    (leaf,) = leaves(from_gymnasium(spaces.Discrete(2)))

    assert leaf.path == ()
    assert leaf.name == path_name(()) == ""


def test_a_space_without_parts_has_no_leaves() -> None:
    assert leaves(from_gymnasium(spaces.Dict({}))) == ()
