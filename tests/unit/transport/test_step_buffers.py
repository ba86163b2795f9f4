import os
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlmesh_ray.spaces.batch import empty_columns, leaves
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.testing.envs import SPACES
from rlmesh_ray.testing.equality import assert_identical
from rlmesh_ray.transport.step_buffers import (
    StepBuffers,
    create_step_buffers,
    is_fixed_size,
    size_bytes,
)

NUM_LANES = 3


def contract(space: gymnasium.Space[Any]) -> EnvContract:
    spec = from_gymnasium(space)
    return EnvContract("test", spec, spec, NUM_LANES, AutoresetMode.NEXT_STEP)


def both_sides(of: EnvContract) -> tuple[StepBuffers, StepBuffers]:
    descriptor = create_step_buffers(of)
    try:
        return StepBuffers(descriptor, of), StepBuffers(descriptor, of)
    finally:
        os.close(descriptor)


def of_arrays(columns: list[Any]) -> list[Any]:
    return [column for column in columns if isinstance(column, np.ndarray)]


def arrays(buffers: StepBuffers) -> list[Any]:
    return [
        *of_arrays(buffers.actions + buffers.observations),
        buffers.results.rewards,
        buffers.results.terminated,
        buffers.results.truncated,
    ]


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_a_new_block_holds_empty_columns(space: gymnasium.Space[Any]) -> None:
    of = contract(space)

    buffers, _ = both_sides(of)

    assert_identical(buffers.actions, empty_columns(of.action_space, NUM_LANES))
    assert_identical(buffers.observations, empty_columns(of.observation_space, NUM_LANES))
    assert_identical(buffers.results.rewards, np.zeros(NUM_LANES))
    assert_identical(buffers.results.terminated, np.zeros(NUM_LANES, bool))
    assert_identical(buffers.results.truncated, np.zeros(NUM_LANES, bool))


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_what_one_side_writes_the_other_reads(space: gymnasium.Space[Any]) -> None:
    own, other = both_sides(contract(space))

    for number, array in enumerate(arrays(own), start=1):
        array.flat[number % array.size] = number

    for left, right in zip(arrays(own), arrays(other), strict=True):
        assert_identical(right, left)
        assert right.any()


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_a_request_sends_the_actions_and_an_answer_the_rest(space: gymnasium.Space[Any]) -> None:
    own, other = StepBuffers(-1, contract(space)), StepBuffers(-1, contract(space))
    for array in arrays(own):
        array.flat[0] = 1

    other.sent_parts[0][:] = own.sent_parts[0]

    assert_identical(other.actions, own.actions)
    assert not any(array.any() for array in arrays(other)[len(of_arrays(other.actions)) :])
    other.sent_parts[1][:] = own.sent_parts[1]
    assert_identical(arrays(other), arrays(own))


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_arrays_are_aligned_and_apart(space: gymnasium.Space[Any]) -> None:
    buffers, _ = both_sides(contract(space))

    starts = [array.__array_interface__["data"][0] for array in arrays(buffers)]

    assert all(start % 64 == 0 for start in starts)
    ends = [start + array.nbytes for start, array in zip(starts, arrays(buffers), strict=True)]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert ends[-1] == starts[0] + size_bytes(contract(space))


def test_text_has_no_place_in_the_block() -> None:
    of = contract(SPACES["text"])

    buffers, _ = both_sides(of)

    assert not is_fixed_size(of)
    assert is_fixed_size(contract(SPACES["box"]))
    assert leaves(of.action_space)[0].dtype is None
    assert buffers.actions == [("",) * NUM_LANES]


def test_the_memory_lives_as_long_as_its_views() -> None:
    buffers, _ = both_sides(contract(SPACES["box"]))
    rewards = buffers.results.rewards
    rewards[:] = 5.0

    del buffers

    assert_identical(rewards, np.full(NUM_LANES, 5.0))


def test_platforms_without_memfd_use_a_nameless_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    own, other = both_sides(contract(SPACES["box"]))

    own.results.rewards[:] = 3.0

    assert_identical(other.results.rewards, np.full(NUM_LANES, 3.0))
