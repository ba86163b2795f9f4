from typing import Any

import gymnasium.spaces as gs
import numpy as np
import pytest

from rlmesh_ray.spaces.contract import describe_difference, space_lines
from rlmesh_ray.spaces.gym_conversion import from_gymnasium

SPACES: list[tuple[gs.Space[Any], str]] = [
    (gs.Box(-1.0, 2.0, (3, 2), np.float32), "Box (3, 2) float32 within [-1, 2]"),
    (gs.Box(0, 255, (4,), np.uint8), "Box (4) uint8 within [0, 255]"),
    (gs.Box(0.0, 1.0, (0,), np.float64), "Box (0) float64"),
    (gs.Discrete(3, start=-1), "Discrete -1…1"),
    (gs.MultiBinary(4), "MultiBinary (4)"),
    (gs.MultiDiscrete([2, 5]), "MultiDiscrete (2) below 2, 5"),
    (gs.Text(8, min_length=2, charset="ab"), "Text of length 2…8, 2 characters"),
]


@pytest.mark.parametrize(("space", "line"), SPACES)
def test_a_leaf_is_one_line(space: gs.Space[Any], line: str) -> None:
    assert space_lines(from_gymnasium(space)) == [line]


def test_nested_leaves_are_named_by_their_path() -> None:
    space = gs.Dict({"a": gs.Discrete(2), "b": gs.Tuple([gs.Discrete(3), gs.MultiBinary(1)])})

    assert space_lines(from_gymnasium(space)) == [
        "a: Discrete 0…1",
        "b.0: Discrete 0…2",
        "b.1: MultiBinary (1)",
    ]
    assert space_lines(from_gymnasium(space["b"]))[0] == "0: Discrete 0…2"


BOX = gs.Box(-1.0, 1.0, (2, 2), np.float32)
CORNER = np.array([[-1.0, -1.0], [-1.0, -2.5]], np.float32)


def differs(own: gs.Space[Any], other: gs.Space[Any]) -> str:
    return describe_difference(from_gymnasium(own), from_gymnasium(other))


@pytest.mark.parametrize(
    ("own", "other", "text"),
    [
        (BOX, BOX, ""),
        (BOX, gs.Box(-1.0, 1.0, (3,)), "shape (3,) where (2, 2) is expected"),
        (BOX, gs.Box(-1.0, 1.0, (2, 2), np.float64), "dtype float64 where float32 is expected"),
        (BOX, gs.Box(-2.0, 1.0, (2, 2)), "low -2.0 where -1.0 is expected"),
        (BOX, gs.Box(-1.0, np.inf, (2, 2)), "high inf where 1.0 is expected"),
        (BOX, gs.Box(CORNER, 1.0), "low[1, 1] -2.5 where -1.0 is expected"),
        (
            BOX,
            gs.Box(CORNER * 3, 1.0),
            "low[0, 0] (and 3 more of its elements) -3.0 where -1.0 is expected",
        ),
        (gs.Box(0.0, 1.0, ()), gs.Box(-0.0, 1.0, ()), "low -0.0 where 0.0 is expected"),
        (gs.Discrete(2), gs.Discrete(3, start=1), "n 3 where 2 is expected; start 1 where 0 is"),
        (gs.MultiBinary(2), gs.MultiBinary([2, 2]), "n (2, 2) where 2 is expected"),
        (gs.MultiDiscrete([2, 5]), gs.MultiDiscrete([2, 4]), "nvec (2, 4) where (2, 5) is"),
        (gs.Text(3, charset="ab"), gs.Text(4, charset="ac"), "max_length 4 where 3 is expected; c"),
        (BOX, gs.Discrete(2), "Discrete 0…1 where Box (2, 2) float32 within [-1, 1] is expected"),
        (gs.Tuple([BOX]), gs.Dict(a=BOX), "Dict of a where Tuple of 0 is expected"),
        (gs.Tuple([BOX]), gs.Tuple([BOX, BOX]), "'1' is not expected"),
        (gs.Dict(a=BOX, b=BOX), gs.Dict(b=BOX, c=BOX), "'a' is missing; 'c' is not expected"),
        (
            gs.Dict(a=gs.Dict(b=gs.Discrete(2)), c=gs.Discrete(2)),
            gs.Dict(a=gs.Dict(b=gs.Discrete(4)), c=gs.Discrete(2)),
            "a.b: n 4 where 2 is expected",
        ),
    ],
)
def test_a_difference_names_the_leaf_what_differs_and_both_sides(
    own: gs.Space[Any], other: gs.Space[Any], text: str
) -> None:
    said = differs(own, other)

    assert said.startswith(text)
    assert bool(said) == bool(text)


def test_the_order_of_keys_differs_too() -> None:
    own, other = (gs.Dict([(key, BOX) for key in keys]) for keys in ("ab", "ba"))

    assert differs(own, other) == "the keys stand in the order b, a where a, b is expected"


def test_bounds_of_all_sizes_are_never_shown_as_bytes() -> None:
    low = np.linspace(-5.0, -1.0, 10_000).astype(np.float32)

    said = differs(gs.Box(-1.0, 1.0, (10_000,)), gs.Box(low, 1.0))

    assert said.startswith("low[0] (and 9998 more of its elements) -5.0 where -1.0 is expected")
    assert "\\x" not in said


def test_many_differences_are_counted() -> None:
    own, other = (gs.Tuple([gs.Discrete(n)] * 9) for n in (2, 3))

    assert differs(own, other).endswith("3: n 3 where 2 is expected; and 5 more differences")


def test_what_is_long_is_cut() -> None:
    assert len(differs(gs.MultiDiscrete([2] * 500), gs.MultiDiscrete([3] * 500))) < 200
