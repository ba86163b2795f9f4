"""The shared-memory block: where processes on one machine keep the arrays of one step.

Both sides compute the same layout from the contract: action columns, observation columns, rewards
and flags, one after the other. Who may write when follows from what they say to each other: who
asks writes the actions before, and the worker writes all else before it replies.
"""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.spaces.batch import Column, leaves
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.spec import SpaceSpec

_ALIGNMENT_BYTES = 64  # a cache line, and the widest vector register


@dataclass(frozen=True, slots=True)
class StepArrays:
    """What one step gave, besides observations."""

    rewards: NDArray[np.float64]
    """``(num_envs,)``"""
    terminated: NDArray[np.bool_]
    """``(num_envs,)``"""
    truncated: NDArray[np.bool_]
    """``(num_envs,)``"""


class StepBuffers:
    """One side's view of the block.

    Args:
        descriptor: Of the memory; the block maps it and leaves the descriptor to the caller. -1:
            new memory, of this process alone.
        contract: What the environment is; the same on both sides.
    """

    def __init__(self, descriptor: int, contract: EnvContract) -> None:
        memory = mmap.mmap(descriptor, size_bytes(contract))
        requested = _request_bytes(contract)
        self.sent_parts = memoryview(memory)[:requested], memoryview(memory)[requested:]
        """The memory of the actions, and that of all else; what is sent where none is shared."""
        views = (
            np.frombuffer(memory, dtype, count=_count(shape), offset=offset).reshape(shape)
            for offset, shape, dtype in _layout(contract)
        )
        self.actions: list[Column] = _columns(contract.action_space, contract.num_envs, views)
        """One a leaf: ``(num_envs, *leaf.shape)`` views, or empty strings for text."""
        self.observations: list[Column] = _columns(
            contract.observation_space, contract.num_envs, views
        )
        """Likewise."""
        self.results = StepArrays(next(views), next(views), next(views))


def is_fixed_size(contract: EnvContract) -> bool:
    """Tell whether all values lie in the block: text does not."""
    spaces = (contract.action_space, contract.observation_space)
    return all(leaf.dtype is not None for space in spaces for leaf in leaves(space))


def size_bytes(contract: EnvContract) -> int:
    """Return how large the block of ``contract`` is."""
    end = 0
    for offset, shape, dtype in _layout(contract):
        end = offset + _count(shape) * dtype.itemsize
    return end


def _request_bytes(contract: EnvContract) -> int:
    """Return how much of the block the actions take."""
    num_actions = sum(leaf.dtype is not None for leaf in leaves(contract.action_space))
    offsets = (offset for offset, _, _ in _layout(contract))
    return next(islice(offsets, num_actions, None))


def _layout(contract: EnvContract) -> Iterator[tuple[int, tuple[int, ...], np.dtype[Any]]]:
    """Yield the offset, shape and dtype of every array in the block."""
    offset = 0
    for shape, dtype in _arrays(contract):
        yield offset, shape, dtype
        size = _count(shape) * dtype.itemsize
        offset += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _arrays(contract: EnvContract) -> Iterator[tuple[tuple[int, ...], np.dtype[Any]]]:
    for space in (contract.action_space, contract.observation_space):
        for leaf in leaves(space):
            if leaf.dtype is not None:
                yield (contract.num_envs, *leaf.shape), leaf.dtype
    yield (contract.num_envs,), np.dtype(np.float64)
    yield (contract.num_envs,), np.dtype(np.bool_)
    yield (contract.num_envs,), np.dtype(np.bool_)


def _columns(space: SpaceSpec, num_lanes: int, views: Iterator[NDArray[Any]]) -> list[Column]:
    return [("",) * num_lanes if leaf.dtype is None else next(views) for leaf in leaves(space)]


def _count(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))
