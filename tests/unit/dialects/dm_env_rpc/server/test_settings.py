"""What clients may set, and how it may look."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from dm_env_rpc.v1 import tensor_utils
from google.protobuf import duration_pb2

from rlmesh_ray.dialects.dm_env_rpc.server.settings import (
    CreateSettings,
    JoinSettings,
    MissingActions,
    ResetOptions,
    create_settings,
    join_settings,
    reset_settings,
)
from rlmesh_ray.errors import CodecError


def tensors(**values: Any) -> dict[str, Any]:
    return {
        key.replace("__", "."): tensor_utils.pack_tensor(value) for key, value in values.items()
    }


def test_nothing_set_is_the_default() -> None:
    assert create_settings({}) == CreateSettings()
    assert join_settings({}) == JoinSettings()
    assert not reset_settings({})


def test_everything_that_can_be_set_at_create() -> None:
    settings = create_settings(
        tensors(
            seed=3,
            options__a__b="x",
            options__c=[1, 2],
            missing_actions="error",
            min_agents=2,
            timeout_s=1.5,
            reset_world_timeout_s=9,
        )
    )

    assert settings.reset_options.seed == 3
    assert settings.reset_options.options["a"] == {"b": "x"}
    assert np.array_equal(settings.reset_options.options["c"], [1, 2])  # type: ignore[arg-type]
    assert settings.missing_actions is MissingActions.ERROR
    assert (settings.min_agents, settings.timeout_ms) == (2, 1500)
    assert settings.reset_world_timeout_s == 9.0


@pytest.mark.parametrize("seed", [5, 5.0, "5", np.uint64(5), np.int32(5), np.float32(5)])
def test_a_seed_is_understood_however_it_is_sent(seed: Any) -> None:
    assert reset_settings(tensors(seed=seed)) == ResetOptions(5)


def test_seeds_may_be_one_a_lane() -> None:
    assert reset_settings(tensors(seed=[4, 5, 6])).seed == (4, 5, 6)


@pytest.mark.parametrize("seed", [-1, 2.5, "x", "-1", True, 2**63 * 1.0, [[1]], [1.5], "5" * 30])
def test_what_is_no_seed_is_refused(seed: Any) -> None:
    with pytest.raises(CodecError, match="seed"):
        reset_settings(tensors(seed=seed))


@pytest.mark.parametrize("text", ['{"seed": 1}', '{"entrypoint": "os"}', "{ }", "[" * 10**5])
def test_json_is_refused_with_the_settings_that_there_are(text: str) -> None:
    with pytest.raises(CodecError, match=r"no create setting 'args'; there are seed, options\.KEY"):
        create_settings(tensors(args=text))


@pytest.mark.parametrize("text", ["{}", "null", ""])
def test_json_that_says_nothing_is_nothing(text: str) -> None:
    assert create_settings(tensors(args=text)) == CreateSettings()


@pytest.mark.parametrize("kind", ["create", "join", "reset"])
def test_what_is_not_known_is_refused_with_what_is(kind: str) -> None:
    read = {"create": create_settings, "join": join_settings, "reset": reset_settings}[kind]

    with pytest.raises(CodecError, match=f"there is no {kind} setting 'levelName'; there are"):
        read(tensors(levelName=1))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("missing_actions", "unknown"),
        ("missing_actions", 1),
        ("missing_actions", [1, 2]),
        ("min_agents", -1),
        ("timeout_s", np.nan),
        ("timeout_s", np.inf),
        ("timeout_s", "soon"),
        ("timeout_s", [1.0, 2.0]),
        ("timeout_s", [1.0]),
        ("args", 3),
        ("args", [1, 2]),
        ("args", ["{}"]),
        ("options.a", duration_pb2.Duration()),
    ],
)
def test_what_a_setting_does_not_take_is_refused_by_name(key: str, value: Any) -> None:
    name = key if key.startswith("options") else repr(key)

    with pytest.raises(CodecError, match=name):
        create_settings({key: tensor_utils.pack_tensor(value)})


@pytest.mark.parametrize(
    "keys",
    [
        ("options.a", "options.a.b"),
        ("options.a.b", "options.a"),
        ("options." + "a." * 20 + "b",),
    ],
)
def test_options_that_cannot_be_nested_are_refused(keys: tuple[str, ...]) -> None:
    settings = {key: tensor_utils.pack_tensor(1) for key in keys}

    with pytest.raises(CodecError):
        create_settings(settings)


def test_which_slot_an_agent_wants() -> None:
    settings = join_settings(tensors(lane=2, agent="cat", batched=False))

    assert settings == JoinSettings(2, "cat", is_batched=False)
    assert join_settings(tensors(batched=True)).is_batched
    with pytest.raises(CodecError, match="batched"):
        join_settings(tensors(batched="yes"))
    with pytest.raises(CodecError, match="batched"):
        join_settings(tensors(batched=[True, False]))


def test_a_short_time_is_not_none_at_all() -> None:
    assert create_settings(tensors(timeout_s=0.0001)).timeout_ms == 1
    assert create_settings(tensors(timeout_s=0)).timeout_ms == 0


@pytest.mark.parametrize("lanes", [[-1], [1, 1], 1, [0.5], ["x"], [[0, 1]]])
def test_lanes_that_are_none_are_refused(lanes: Any) -> None:
    with pytest.raises(CodecError, match="expected a list of different integers"):
        reset_settings(tensors(lanes=lanes), is_batched=True)


def test_lanes_are_of_a_batch_and_have_seeds_of_their_own() -> None:
    reset_options = reset_settings(tensors(lanes=[2, 0], seed=[7, 8]), is_batched=True)

    assert reset_options == ResetOptions((7, 8), lanes=(2, 0))
    reset_options.check(3)
    with pytest.raises(CodecError, match="the last lane is 1"):
        reset_options.check(2)
    with pytest.raises(CodecError, match="no reset setting 'lanes'"):
        reset_settings(tensors(lanes=[0]))


@pytest.mark.parametrize("key", ["seed", "lanes", "options.x"])
def test_one_element_does_not_stand_for_more_than_there_may_be_lanes(key: str) -> None:
    one = tensor_utils.pack_tensor(np.int64(1))
    one.shape.append(2**16 + 1)

    with pytest.raises(CodecError, match=f"{key}' stands for 65537 equal elements"):
        reset_settings({key: one}, is_batched=True)
    many = tensor_utils.pack_tensor(np.arange(2**16 + 1))
    if key != "options.x":
        with pytest.raises(CodecError, match=key):
            reset_settings({key: many}, is_batched=True)


def test_no_strings_do_not_stand_for_any_number_of_lists() -> None:
    none = pb.Tensor(strings={}, shape=[10**5, 10**5, 0])

    peak_bytes = peak_of(lambda: reset_settings({"options.x": none}))

    assert peak_bytes < 2**22


def test_an_error_quotes_the_beginning_of_a_long_list() -> None:
    text = tensor_utils.pack_tensor("x" * 1000)
    text.shape.append(2**16)

    peak_bytes = peak_of(lambda: reset_settings({"seed": text}))

    assert peak_bytes < 2**22


def peak_of(refused: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            refused()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
