import string
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_differing_spaces, batch_space
from hypothesis import given

from rlmesh_ray.errors import UnsupportedSpaceError
from rlmesh_ray.spaces.gym_conversion import (
    Space,
    from_gymnasium,
    require_one_space,
    to_gymnasium,
)
from rlmesh_ray.spaces.spec import DiscreteSpec, TextSpec
from rlmesh_ray.testing.strategies import gymnasium_spaces


class Custom(gymnasium.Space[Any]):
    def __repr__(self) -> str:
        return "Custom()"


class Mission(gymnasium.Space[str]):
    """A space of strings that is no Text, as MiniGrid's MissionSpace is none."""

    def __init__(self, shape: tuple[int, ...] | None = None) -> None:
        super().__init__(shape, str)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return "go to the red ball, then open a door"

    def contains(self, x: Any) -> bool:
        return bool(x == self.sample())


class ShortText(spaces.Text):
    """A Text that is narrower than its charset and its lengths."""

    def contains(self, x: Any) -> bool:
        return x in ("a", "bb")


@given(space=gymnasium_spaces())
def test_the_round_trip_gives_an_equal_space(space: Space) -> None:
    spec = from_gymnasium(space)

    back = to_gymnasium(spec)

    assert back == space
    assert from_gymnasium(back) == spec


def test_bounds_that_are_almost_equal_stay_apart() -> None:
    # Box.__eq__ compares with a tolerance; the spec must not.
    space = spaces.Box(np.array([0.1, 0.1 + 1e-12]), np.ones(2), dtype=np.float64)

    back = to_gymnasium(from_gymnasium(space))

    assert isinstance(back, spaces.Box)
    assert back.low.tobytes() == space.low.tobytes()


def test_the_order_of_dict_keys_is_kept() -> None:
    space = spaces.Dict([("b", spaces.Discrete(2)), ("a", spaces.Discrete(3))])

    back = to_gymnasium(from_gymnasium(space))

    assert isinstance(back, spaces.Dict)
    assert list(back.spaces) == ["b", "a"]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, ()),
        spaces.Box(-np.inf, np.inf, (2,), np.float16),
        spaces.Discrete(3, start=-1),
        spaces.MultiDiscrete([3, 4]),
        spaces.Text(5),
    ],
)
def test_the_new_space_can_be_sampled(space: Space) -> None:
    back = to_gymnasium(from_gymnasium(space))
    back.seed(1)

    assert space.contains(back.sample())


@pytest.mark.parametrize(
    ("space", "reason"),
    [
        (spaces.Graph(spaces.Discrete(2), None), "supported are Box, Discrete"),
        (spaces.Sequence(spaces.Discrete(2)), "supported are"),
        (spaces.OneOf([spaces.Discrete(2)]), "supported are"),
        (Custom(), "FilterObservation, or make one of these of it with TransformObservation"),
        (Mission(shape=(2,)), "supported are"),
        (spaces.MultiDiscrete([2], start=[1]), "no start for MultiDiscrete"),
        (spaces.Dict({1: spaces.Discrete(2)}), "key 1 is not a UTF-8 string"),  # type: ignore[dict-item]
        (spaces.Dict({"\ud800": spaces.Discrete(2)}), "not a UTF-8 string"),
        (spaces.Box(0, 1, (2,), np.longdouble), "has no wire form"),
        (spaces.Box(0, 1, (2,), np.dtype(">f4")), "dtype >f4 has no wire form"),  # type: ignore[arg-type]
        (spaces.Discrete(2**63, dtype=np.uint64), "beyond int64"),
        (spaces.Discrete(100, start=100, dtype=np.int8), "beyond int8"),
        (spaces.MultiDiscrete(np.array([2**63], np.uint64), np.uint64), "beyond int64"),
        (spaces.Text(2**63), "beyond int64"),
        (spaces.Text(5, charset=""), "on the wire that means all"),
        (spaces.Text(5, charset=frozenset({"ab"})), "more than single characters"),
        (spaces.Text(5, charset="\ud800"), "surrogates"),
        (spaces.Box(0, 1, (1,) * 32), "more than 31 axes"),
    ],
)
def test_what_the_contract_cannot_express_is_refused_with_the_reason(
    space: Space, reason: str
) -> None:
    with pytest.raises(UnsupportedSpaceError, match=reason):
        from_gymnasium(space)
    with pytest.raises(UnsupportedSpaceError, match=f" at arm cannot be served: .*{reason}"):
        from_gymnasium(spaces.Dict({"arm": space}))


def test_the_part_that_cannot_be_expressed_is_named() -> None:
    space = spaces.Dict({"arm": spaces.Tuple([spaces.Discrete(2), Custom()])})

    with pytest.raises(UnsupportedSpaceError, match=r"the space Custom\(\) at arm\.1 cannot"):
        from_gymnasium(space)


def test_a_space_with_values_that_are_too_large_is_refused_as_a_whole() -> None:
    space = spaces.Dict({"map": spaces.MultiBinary([2**14, 2**13 + 1])})

    with pytest.raises(UnsupportedSpaceError, match=r"the space Dict\(.* more than 134217728"):
        from_gymnasium(space)


def test_nesting_has_an_end() -> None:
    space: Space = spaces.Discrete(2)
    for _ in range(32):
        space = spaces.Tuple([space])
    from_gymnasium(space)

    with pytest.raises(UnsupportedSpaceError, match="more than 32 deep"):
        from_gymnasium(spaces.Tuple([space]))


def test_a_text_that_allows_all_gets_a_space_that_can_be_sampled() -> None:
    space = to_gymnasium(TextSpec(1, 4, ""))
    space.seed(1)

    assert space == spaces.Text(4, charset=string.printable)
    assert space.sample()


def test_a_custom_space_of_strings_is_served_as_a_text_that_holds_its_values() -> None:
    mission = Mission()

    text = to_gymnasium(from_gymnasium(spaces.Dict({"mission": mission})))["mission"]  # type: ignore[index]

    assert isinstance(text, spaces.Text)
    assert text.contains(mission.sample())
    assert text.contains("")


def test_a_subclass_of_text_is_served_as_that_text() -> None:
    assert from_gymnasium(ShortText(2, charset="ab")) == TextSpec(1, 2, "ab")


def test_a_discrete_keeps_its_dtype() -> None:
    spec = from_gymnasium(spaces.Discrete(3, dtype=np.uint8))

    assert spec == DiscreteSpec(3, 0, "uint8")


def test_a_gymnasium_without_dtypes_of_discrete_spaces_has_int64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Old(spaces.Discrete):  # as up to 1.2.0
        def __init__(self, n: int, seed: int | None = None, start: int = 0) -> None:
            super().__init__(n, seed=seed, start=start)

    monkeypatch.setattr(spaces, "Discrete", Old)

    for spec in (DiscreteSpec(3, -1), DiscreteSpec(3, -1, "int8")):
        space = to_gymnasium(spec)

        assert isinstance(space, Old)
        assert from_gymnasium(space) == DiscreteSpec(3, -1)


@given(space=gymnasium_spaces())
def test_lanes_of_one_space_have_one_space(space: Space) -> None:
    require_one_space("observation", space, batch_space(space, 3))
    require_one_space("observation", space, batch_space(space, 1))
    require_one_space("observation", space, space)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (spaces.Box(0, 1), spaces.Box(0, 2)),
        (spaces.Box(0, 1, (2, 2)), spaces.Box(np.array([[0, 0], [0, 0.5]], np.float32), 1.0)),
        (spaces.Discrete(3), spaces.Discrete(4)),
        (spaces.Discrete(3), spaces.Discrete(3, start=1)),
        (spaces.MultiDiscrete([2, 3]), spaces.MultiDiscrete([2, 4])),
        (spaces.Text(3), spaces.Text(4)),
    ],
)
def test_lanes_of_different_spaces_are_refused(first: Space, second: Space) -> None:
    equal = spaces.Box(0, 1)
    for wrap in (
        lambda space: space,
        lambda space: spaces.Dict({"a": equal, "b": space}),
        lambda space: spaces.Tuple([equal, spaces.Dict({"b": space})]),
    ):
        own: list[Space] = [wrap(first), wrap(first), wrap(second)]
        with pytest.raises(UnsupportedSpaceError, match="have different bounds in the action spa"):
            require_one_space("action", own[0], batch_differing_spaces(own))


def test_the_order_of_characters_does_not_travel() -> None:
    space = spaces.Text(20, charset="ba")

    back = to_gymnasium(from_gymnasium(space))

    assert back == space
    assert isinstance(back, spaces.Text)
    assert (space.character_list, back.character_list) == (("b", "a"), ("a", "b"))
