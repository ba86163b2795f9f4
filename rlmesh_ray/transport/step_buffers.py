"""Step buffers: the arrays of one step (actions, observations, rewards, flags) in one memory block.

Two processes of one machine map the same block. Both compute its layout from the contract: action
columns, observation columns, rewards and flags, one after the other. The requesting side writes the
actions before it sends a request, the worker everything else before it replies.
"""

import math
import mmap
import os
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.spaces.batch import Column, leaves
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.spec import SpaceSpec

_ALIGNMENT_BYTES = 64  # a cache line, and the widest vector register
_SIZE_SEALS = 7  # F_SEAL_SEAL, F_SEAL_SHRINK and F_SEAL_GROW, which macOS does not have


class StepArrays(NamedTuple):
    """Rewards and flags of one vector step; all are ``(num_envs,)``."""

    rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]


class StepBuffers:
    """NumPy views of the arrays in one memory block.

    It maps the memory of ``descriptor``, which the caller keeps; -1: new memory, which no other
    process shares.
    """

    def __init__(self, descriptor: int, contract: EnvContract) -> None:
        memory = mmap.mmap(descriptor, size_bytes(contract))
        layout = _layout(contract)
        num_actions = sum(leaf.dtype is not None for leaf in leaves(contract.action_space))
        requested, _, _ = layout[num_actions]  # the actions come first
        self.sent_parts = memoryview(memory)[:requested], memoryview(memory)[requested:]
        """The memory of the actions, and of the rest; sent over TCP, where no memory is shared."""
        views = (
            np.frombuffer(memory, dtype, count=math.prod(shape), offset=offset).reshape(shape)
            for offset, shape, dtype in layout
        )
        self.actions: list[Column] = _columns(contract.action_space, contract.num_envs, views)
        """One column for each leaf: ``(num_envs, *leaf.shape)`` views; empty strings for text."""
        self.observations: list[Column] = _columns(
            contract.observation_space, contract.num_envs, views
        )
        self.results = StepArrays(next(views), next(views), next(views))


def is_fixed_size(contract: EnvContract) -> bool:
    """Return whether the buffers hold all values of a step: text has no fixed size."""
    spaces = (contract.action_space, contract.observation_space)
    return all(leaf.dtype is not None for space in spaces for leaf in leaves(space))


def size_bytes(contract: EnvContract) -> int:
    offset, shape, dtype = _layout(contract)[-1]
    return offset + math.prod(shape) * dtype.itemsize


def create_step_buffers(contract: EnvContract) -> int:
    """Return the descriptor of new memory that ``StepBuffers`` can map."""
    return create_memory(size_bytes(contract))


def _layout(contract: EnvContract) -> list[tuple[int, tuple[int, ...], np.dtype[Any]]]:
    """Return the offset, shape and dtype of every array."""
    num_lanes = contract.num_envs
    arrays = [
        ((num_lanes, *leaf.shape), leaf.dtype)
        for space in (contract.action_space, contract.observation_space)
        for leaf in leaves(space)
        if leaf.dtype is not None
    ]
    arrays += [((num_lanes,), np.dtype(kind)) for kind in (np.float64, np.bool_, np.bool_)]
    layout, offset = [], 0
    for shape, dtype in arrays:
        layout.append((offset, shape, dtype))
        size = math.prod(shape) * dtype.itemsize
        offset += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return layout


def _columns(space: SpaceSpec, num_lanes: int, views: Iterator[NDArray[Any]]) -> list[Column]:
    return [("",) * num_lanes if leaf.dtype is None else next(views) for leaf in leaves(space)]


def can_seal() -> bool:
    """Return whether the size of memory can be sealed (Linux), so that clients may map it."""
    return hasattr(os, "memfd_create")


def create_memory(size: int) -> int:
    """Return the descriptor of ``size`` bytes of new, anonymous memory, all zeros.

    Where possible its size is sealed: else a process that has the descriptor could shrink it, and
    SIGBUS would kill the others when they read.
    """
    if not can_seal():
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    else:
        descriptor = os.memfd_create("rlmesh-ray", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        if can_seal():
            import fcntl  # not available on Windows, where clients import this module

            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
