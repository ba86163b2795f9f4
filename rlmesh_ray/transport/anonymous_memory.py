"""Memory that processes share by descriptor: it has no name and needs no cleaning up."""

import fcntl
import mmap
import os
import tempfile

from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.step_buffers import size_bytes
from rlmesh_ray.transport.session_progress import SessionProgress

_SIZE_SEALS = 7  # F_SEAL_SEAL, F_SEAL_SHRINK and F_SEAL_GROW, which macOS does not have


def can_seal() -> bool:
    """Tell whether memory may be given to strangers: they cannot change its size (Linux)."""
    return hasattr(os, "memfd_create")


def create_step_buffers(contract: EnvContract) -> int:
    """Return the descriptor of new memory for a ``StepBuffers``."""
    return create_memory(size_bytes(contract))


def create_progress(num_lanes: int) -> int:
    """Return the descriptor of new memory for a ``SessionProgress``."""
    return create_memory(SessionProgress.size_bytes(num_lanes))


def map_progress(descriptor: int, num_lanes: int) -> SessionProgress:
    """Return the progress in memory that ``create_progress`` made; maps it."""
    size = SessionProgress.size_bytes(num_lanes)
    return SessionProgress(memoryview(mmap.mmap(descriptor, size)), num_lanes)


def create_memory(size: int) -> int:
    """Return the descriptor of ``size`` bytes of new memory, all zeros.

    Where it can be, its size is sealed: whoever holds the descriptor could else shrink it, and
    every process that maps it would be killed for reading what is not there any more.
    """
    if not can_seal():
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    else:
        descriptor = os.memfd_create("rlmesh-ray", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        if can_seal():
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
