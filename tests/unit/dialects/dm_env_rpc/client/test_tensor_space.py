"""Spaces out of what dm_env_rpc servers describe."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray.dialects.dm_env_rpc.client.settings import DmEnvRpcSettings
from rlmesh_ray.dialects.dm_env_rpc.client.tensor_space import (
    SpaceReader,
    TensorSpace,
    WorldContract,
    contract_of_world,
    exact_space,
)
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import (
    AgentSpecs,
    DataType,
    TensorSpec,
    tensor_name,
    tensor_spec,
)
from rlmesh_ray.errors import HandshakeRefusedError, UnsupportedSpaceError
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium, to_gymnasium
from rlmesh_ray.spaces.spec import SpaceSpec, leaves

DISCRETE = from_gymnasium(spaces.Discrete(2))
ALL = DmEnvRpcSettings()


def spec(
    name: str, kind: DataType, shape: tuple[int, ...] = (), low: Any = None, high: Any = None
) -> TensorSpec:
    low, high = (None if one is None else np.array(one, kind.numpy) for one in (low, high))
    return TensorSpec(name, kind, shape, low, high)


def tensor_specs(space: SpaceSpec, root: str, num_lanes: int | None = None) -> list[TensorSpec]:
    return [tensor_spec(leaf, tensor_name(leaf.path, root), num_lanes) for leaf in leaves(space)]


def read_space(
    specs: list[TensorSpec], root: str = "observation", settings: DmEnvRpcSettings = ALL
) -> TensorSpace:
    return SpaceReader(settings, root, "a server").read(specs)


def read(*specs: TensorSpec, root: str = "observation", settings: DmEnvRpcSettings = ALL) -> Any:
    return to_gymnasium(read_space(list(specs), root, settings).space)


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        (
            spec("observation", DataType.FLOAT, (2,)),
            spaces.Box(-np.inf, np.inf, (2,), np.float32),
        ),
        (spec("observation", DataType.DOUBLE, (2,), -1, 1), spaces.Box(-1, 1, (2,), np.float64)),
        (
            spec("observation", DataType.FLOAT, (2,), [-1, -2], [1, 2]),
            spaces.Box(np.array([-1, -2], np.float32), np.array([1, 2], np.float32)),
        ),
        (spec("observation", DataType.FLOAT, (1,), 0), spaces.Box(0, np.inf, (1,), np.float32)),
        (
            spec("observation", DataType.UINT8, (4, 4, 3), 0, 255),
            spaces.Box(0, 255, (4, 4, 3), np.uint8),
        ),
        (spec("observation", DataType.UINT8, (2,)), spaces.Box(0, 255, (2,), np.uint8)),
        (spec("observation", DataType.INT32, (2,), 0, 3), spaces.Box(0, 3, (2,), np.int32)),
        (
            spec("observation", DataType.INT32, (), -1, 1),
            spaces.Discrete(3, start=-1, dtype=np.int32),
        ),
        (spec("observation", DataType.INT8), spaces.Box(-128, 127, (), np.int8)),
        (spec("observation", DataType.UINT8, (), 0, 255), spaces.Box(0, 255, (), np.uint8)),
        (spec("observation", DataType.INT8, (), -128, 127), spaces.Box(-128, 127, (), np.int8)),
        (
            spec("observation", DataType.INT64, (), 0, 10**9),
            spaces.Box(0, 10**9, (), np.int64),
        ),
        (spec("observation", DataType.BOOL, (3,)), spaces.MultiBinary((3,))),
        (spec("observation", DataType.BOOL), spaces.Discrete(2)),
        (spec("observation", DataType.FLOAT, (0,)), spaces.Box(-np.inf, np.inf, (0,), np.float32)),
    ],
)
def test_a_tensor_alone_makes_a_bare_space(described: TensorSpec, expected: Any) -> None:
    assert read(described) == expected


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        (spec("action", DataType.INT32, (2,), 0, [2, 4]), spaces.MultiDiscrete([3, 5])),
        (
            spec("action", DataType.INT64, (2,), [0, 1], [2, 4]),
            spaces.Box(np.array([0, 1]), np.array([2, 4]), (2,), np.int64),
        ),
        (spec("action", DataType.INT32, (2,), 0), spaces.Box(0, 2**31 - 1, (2,), np.int32)),
    ],
)
def test_integers_in_actions_are_choices_if_they_count_from_0(
    described: TensorSpec, expected: Any
) -> None:
    assert read(described, root="action") == expected


def test_a_string_makes_a_text_of_any_characters() -> None:
    space = read_space([spec("observation", DataType.STRING)]).space

    assert (space.min_length, space.max_length, space.charset) == (0, 4096, "")  # type: ignore[union-attr]


def test_periods_nest_and_keys_are_sorted() -> None:
    made = read_space(
        [
            spec("eye.left", DataType.FLOAT),
            spec("ear", DataType.DOUBLE),
            spec("eye.depth.far", DataType.INT8),
        ],
    )

    assert [tensor.name for tensor in made.tensors] == ["ear", "eye.depth.far", "eye.left"]
    space = to_gymnasium(made.space)
    assert list(space) == ["ear", "eye"]  # type: ignore[call-overload]
    assert list(space["eye"]) == ["depth", "left"]  # type: ignore[index]


def test_reward_and_discount_and_pictures_are_no_observations() -> None:
    space = read(
        spec("observation", DataType.FLOAT),
        spec("reward", DataType.FLOAT),
        spec("discount", DataType.FLOAT),
        spec("rendering", DataType.UINT8, (2, 2, 3)),
    )

    assert isinstance(space, spaces.Box)


def test_what_is_chosen_is_read_and_nothing_else() -> None:
    tensors = (
        spec("eye.left", DataType.FLOAT),
        spec("eye.right", DataType.FLOAT),
        spec("eyelid", DataType.FLOAT),
        spec("rendering", DataType.UINT8, (2, 2, 3)),
        spec("words", DataType.STRING, (-1,)),
    )

    space = read(*tensors, settings=DmEnvRpcSettings(observations=("eye", "rendering")))

    assert list(space) == ["eye", "rendering"]
    assert list(space["eye"]) == ["left", "right"]


def test_a_tensor_alone_has_a_dict_round_it_unless_it_is_said_otherwise() -> None:
    paddle = spec("paddle", DataType.INT8, (), -1, 1)

    assert read(paddle, root="action") == spaces.Dict(
        {"paddle": spaces.Discrete(3, start=-1, dtype=np.int8)}
    )
    assert read(paddle, root="action", settings=DmEnvRpcSettings(is_bare=True)) == spaces.Discrete(
        3, start=-1, dtype=np.int8
    )


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ([spec("a", DataType.FLOAT, (2, -1))], r"'a' .* its shape \[2, -1\] varies; leave it out"),
        ([spec("a", DataType.STRING, (2,))], r"holds strings in shape \[2\]"),
        ([spec("a", DataType.PROTO)], "holds PROTO, which only its server understands"),
        ([spec("a", DataType.FLOAT), spec("a.b", DataType.FLOAT)], "'a.b' and another tensor"),
        ([spec("a.b", DataType.FLOAT), spec("a", DataType.FLOAT)], "'a' and another tensor"),
        ([spec("a", DataType.FLOAT, (2**20, 2**20))], "bytes, more than"),
        ([spec("a", DataType.FLOAT, (2**25,)), spec("b", DataType.FLOAT)], "more than"),
        ([spec("a", DataType.FLOAT, (1,) * 32)], "more than 31 axes"),
        ([spec("a" + ".a" * 99_999, DataType.FLOAT)], "nested more than 32 deep"),
        ([spec("a", DataType.FLOAT, (), np.nan)], "contradict each other, or are no numbers"),
        ([spec("a", DataType.INT8, (2,), 127, [127, 126])], "contradict each other"),
        ([], "none that a space could be made of"),
    ],
)
def test_what_has_no_form_is_refused(tensors: list[TensorSpec], complaint: str) -> None:
    with pytest.raises(UnsupportedSpaceError, match=complaint):
        read_space(tensors)


def test_choosing_what_is_not_there_names_what_is() -> None:
    with pytest.raises(UnsupportedSpaceError, match="no 'nose', only ear, eye"):
        read(
            spec("eye", DataType.FLOAT),
            spec("ear", DataType.FLOAT),
            settings=DmEnvRpcSettings(observations=("nose",)),
        )


SERVED = spaces.Dict(
    {
        "a.b": spaces.Box(-1, 1, (2,), np.float16),
        "pair": spaces.Tuple([spaces.Discrete(3, start=2), spaces.MultiBinary(2)]),
        "reward": spaces.Text(5),
        "flag": spaces.MultiBinary(3),
    }
)


@pytest.mark.parametrize("width", [None, 3])
def test_our_own_servers_give_back_the_exact_space(width: int | None) -> None:
    space = from_gymnasium(SERVED)
    specs = tensor_specs(space, "observation", width)

    made = exact_space(
        space, [*reversed(specs), spec("reward", DataType.DOUBLE)], "observation", width
    )

    assert made is not None
    assert made.space == space
    assert [tensor.name for tensor in made.tensors] == [one.name for one in specs]


def test_a_contract_of_something_else_is_not_exact() -> None:
    space = from_gymnasium(SERVED)

    assert exact_space(space, tensor_specs(space, "observation")[1:], "observation") is None
    assert exact_space(space, tensor_specs(space, "observation", 3), "observation") is None


def test_more_integers_than_a_menu_has_are_numbers() -> None:
    made = read(spec("action", DataType.INT8, (2**17,), 0, 1), root="action")

    assert made == spaces.Box(0, 1, (2**17,), np.int8)


@pytest.mark.parametrize(
    "flag",
    [
        {"shape": (4,)},
        {"shape": (2**20, 2**20)},
        {"dtype": DataType.STRING},
        {"dtype": DataType.INVALID},
        {"name": "not named"},
    ],
)
def test_a_batch_tells_a_number_a_lane_beside_its_observations(flag: dict[str, Any]) -> None:
    contract = EnvContract(
        "Own-v0", from_gymnasium(spaces.Box(0, 1, (2,))), DISCRETE, 3, AutoresetMode.NEXT_STEP
    )
    flags = [
        TensorSpec("reward", DataType.DOUBLE, (3,)),
        TensorSpec("terminated", DataType.BOOL, (3,)),
        TensorSpec("truncated", DataType.BOOL, (3,)),
    ]

    def batch(flags: list[TensorSpec]) -> WorldContract:
        reported = [*tensor_specs(contract.observation_space, "observation", 3), *flags]
        does = tensor_specs(contract.action_space, "action", 3)
        specs = AgentSpecs(dict(enumerate(does)), dict(enumerate(reported)))
        return contract_of_world(specs, contract, DmEnvRpcSettings(batched=True), "here")

    assert batch(flags)[0].num_envs == 3
    for index, one in enumerate(flags):
        with pytest.raises(HandshakeRefusedError, match="join without batched"):
            batch([*flags[:index], replace(one, **flag), *flags[index + 1 :]])


def test_choices_are_numbered_from_0_where_that_is_wanted() -> None:
    made = read_space(
        [
            spec("a", DataType.INT8, (), -1, 1),
            spec("b", DataType.INT32, (2,), [-1, 5], [1, 5]),
            spec("c", DataType.FLOAT, (), -1, 1),
            spec("d", DataType.INT32),
        ],
        "action",
        DmEnvRpcSettings(choices_from_zero=True),
    )

    assert to_gymnasium(made.space) == spaces.Dict(
        {
            "a": spaces.Discrete(3),
            "b": spaces.MultiDiscrete([3, 1]),
            "c": spaces.Box(-1, 1, (), np.float32),
            "d": spaces.Box(-(2**31), 2**31 - 1, (), np.int32),
        }
    )
    shifts = [None if one is None else one.tolist() for one in made.shifts()]
    assert shifts == [-1, [-1, 5], None, None]
