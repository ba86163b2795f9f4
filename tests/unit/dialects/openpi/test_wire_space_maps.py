"""Observations and results of openpi's messages, by spaces."""

from collections import OrderedDict
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray.dialects.openpi import wire
from rlmesh_ray.dialects.openpi.wire import decode_actions, encode_observations, pack, unpack
from rlmesh_ray.errors import CodecError, ConfigurationError
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.spec import Column, SpaceSpec


def box(*shape: int, dtype: Any = np.float32) -> gymnasium.Space[Any]:
    high = 255 if dtype is np.uint8 else 1
    return spaces.Box(0, high, shape, dtype)


def spec(**parts: gymnasium.Space[Any]) -> SpaceSpec:
    return from_gymnasium(spaces.Dict(OrderedDict(parts)))


SLASHES = spec(
    **{
        "observation/image": box(2, 2, 3, dtype=np.uint8),
        "observation/state": box(2),
        "prompt": spaces.Text(40),
    }
)
NESTED = from_gymnasium(
    spaces.Dict(
        OrderedDict(
            observation=spaces.Dict(OrderedDict(image=box(2, 2, 3, dtype=np.uint8), state=box(2))),
            prompt=spaces.Text(40),
        )
    )
)
IMAGE, STATE = np.arange(12, dtype=np.uint8).reshape(2, 2, 3), np.array([0.5, 1.0])


@pytest.mark.parametrize("space", [SLASHES, NESTED], ids=["slashes", "nested"])
@pytest.mark.parametrize(
    "message",
    [
        {"observation/image": IMAGE, "observation/state": STATE, "prompt": "go on"},
        {"prompt": "go on", "observation": {"state": STATE, "image": IMAGE}},
        {"observation/image": IMAGE, "observation": {"state": [0.5, 1]}, "prompt": "go on"},
    ],
    ids=["slashes", "nested", "mixed"],
)
def test_keys_with_slashes_and_nested_maps_name_the_same_leaves(
    space: SpaceSpec, message: dict[str, Any]
) -> None:
    image, state, prompt = wire.codec(space).decode(pack(message), 1)

    assert np.array_equal(image, IMAGE[None])
    assert isinstance(state, np.ndarray)
    assert state.dtype == np.float32
    assert state.tolist() == [[0.5, 1.0]]
    assert prompt == ("go on",)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": None}, "prompt is NoneType, expected a string; this policy takes"),
        (
            {"observation/state": np.zeros(3)},
            r"observation/state has shape \(3,\), expected \(2,\)",
        ),
        (
            {"observation/image": IMAGE / 255},
            "observation/image .* cannot be held exactly by uint8",
        ),
        ({"state": STATE}, r"has the unknown 'state'; this policy takes observation/image \(Box"),
        ({"observation": {"state": STATE}}, "the key 'observation/state' twice"),
        ({"observation/image": {"x": 1}}, "observation/image is no array, no number"),
        ({"observation": {"image2": 1}}, r"has the unknown 'observation/image2'; this policy"),
        ({"other": {"x": {"y": 1}}}, r"has the unknown 'other'; this policy takes"),
        ({"observation/state": np.array([0.5, 1e300])}, r"has 1e\+300, which is beyond float32"),
        ({"observation/state": [[1], [2, 3]]}, "observation/state is no array"),
    ],
)
def test_an_observation_that_does_not_fit_is_refused_with_what_the_policy_takes(
    changes: dict[str, Any], reason: str
) -> None:
    message = {"observation/image": IMAGE, "observation/state": STATE, "prompt": "go", **changes}

    with pytest.raises(CodecError, match=reason):
        wire.codec(SLASHES).decode(pack(message), 1)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(CodecError, match=r"lacks 'observation/image', 'prompt'; this policy takes"):
        wire.codec(SLASHES).decode(pack({"observation/state": STATE}), 1)


@pytest.mark.parametrize("message", [[1], "text", 3, np.zeros(2)])
def test_an_observation_is_a_map(message: object) -> None:
    with pytest.raises(CodecError, match="no map from names to arrays"):
        wire.codec(SLASHES).decode(pack(message), 1)


def test_a_space_that_is_a_leaf_has_the_key_observation_and_actions() -> None:
    codec = wire.codec(from_gymnasium(box(2)))

    (column,) = codec.decode(pack({"observation": STATE}), 1)
    result = unpack(codec.result([codec.encode([column], 1)], {"infer_ms": 1.5}))

    assert np.array_equal(result["actions"], [[0.5, 1.0]])
    assert result["server_timing"] == {"infer_ms": 1.5}


def test_several_observations_make_one_batch_and_their_actions_are_split() -> None:
    codec = wire.codec(from_gymnasium(box(2)))
    messages = [pack({"observation": STATE * factor}) for factor in (0.0, 1.0)]

    columns = codec.join(messages, [1, 1])
    results = [unpack(codec.result([each], {})) for each in codec.split(columns, [1, 1])]

    assert [result["actions"].tolist() for result in results] == [[[0.0, 0.0]], [[0.5, 1.0]]]


def test_a_chunk_is_the_first_axis_of_the_actions() -> None:
    codec = wire.codec(spec(arm=box(2), gripper=spaces.Discrete(3)))
    steps = [
        codec.encode([np.full((1, 2), step, np.float32), np.array([step])], 1) for step in range(3)
    ]

    result = unpack(codec.result(steps, {}))

    assert result["arm"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert result["gripper"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("space", [SLASHES, NESTED], ids=["slashes", "nested"])
def test_a_client_sends_maps_as_its_space_nests_them(space: SpaceSpec) -> None:
    columns: list[Column] = [np.stack([IMAGE, IMAGE]), np.zeros((2, 2), np.float32), ("a", "b")]

    first, second = encode_observations(space, columns, 2)

    assert ("observation" in unpack(first)) is (space is NESTED)
    assert wire.codec(space).decode(first, 1)[2] == ("a",)
    assert wire.codec(space).decode(second, 1)[2] == ("b",)


ARM = from_gymnasium(box(2))


def test_a_result_may_be_a_chunk_or_a_single_action_of_another_dtype() -> None:
    space = ARM

    (chunk,) = decode_actions(space, {"actions": np.zeros((3, 2)), "state": STATE})
    (single,) = decode_actions(space, {"actions": [0.5, 1]})

    assert chunk.shape == (3, 2)
    assert chunk.dtype == np.float32
    assert single.tolist() == [[0.5, 1.0]]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"action": np.zeros((3, 2))}, "no 'actions', only: action"),
        ({"actions": np.zeros((3, 7))}, r"actions in the result has shape \(3, 7\)"),
        ({"actions": np.zeros((0, 2))}, r"has \[0\] actions"),
        ({"actions": np.zeros((1, 1, 3, 2))}, "shape"),
        ({"actions": np.array([[np.nan, 0.0]])}, "is NaN"),
        ({"actions": np.array([[1e300, 0.0]])}, r"has 1e\+300, which is beyond float32"),
        ({"actions": {"x": 1}}, "actions in the result"),
        ({"actions": "left"}, "actions in the result"),
        ({"actions": None}, "actions in the result"),
        ({"actions": [[[1.0], [2.0]], [[3.0]]]}, "actions in the result is no array"),
    ],
)
def test_a_result_that_is_no_action_of_the_space_is_refused(
    message: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CodecError, match=reason):
        decode_actions(ARM, message)


def test_an_infinite_number_is_one_of_float32() -> None:
    unbounded = from_gymnasium(spaces.Box(-np.inf, np.inf, (2,), np.float32))

    (column,) = wire.codec(unbounded).decode(pack({"observation": [np.inf, 1.0]}), 1)

    assert isinstance(column, np.ndarray)
    assert column.tolist() == [[np.inf, 1.0]]


def test_the_parts_of_an_action_have_one_horizon() -> None:
    space = spec(arm=box(2), gripper=spaces.Discrete(3))

    with pytest.raises(CodecError, match=r"has \[3, 2\] actions"):
        decode_actions(space, {"arm": np.zeros((3, 2)), "gripper": np.zeros(2, int)})
    arm, gripper = decode_actions(space, {"arm": np.zeros((3, 2)), "gripper": np.zeros(3, int)})
    assert len(arm) == len(gripper) == 3


def test_spaces_without_a_form_are_refused() -> None:
    nested = spaces.Dict({"b": box(1)})
    with pytest.raises(ConfigurationError, match="'a/b' in openpi's messages; rename one"):
        wire.require_keys(spec(**{"a/b": box(1), "a": nested}), "observation")
    with pytest.raises(ConfigurationError, match="the action 'say' is text"):
        wire.require_actions(spec(say=spaces.Text(3)))
    with pytest.raises(ConfigurationError, match="key 'server_timing', which openpi's results use"):
        wire.require_actions(spec(server_timing=box(1)))
    wire.require_actions(ARM)


def test_the_limit_of_a_message_has_room_for_numbers_of_numpys_default_dtype() -> None:
    message = pack({"observation": np.zeros(10_000)})

    assert len(message) <= wire.message_bytes(from_gymnasium(box(10_000))) < 2 * len(message)
    image = from_gymnasium(box(100, 100, 3, dtype=np.uint8))
    assert 30_000 < wire.message_bytes(image) < 100_000
