"""Anonymous shared memory (memfd): shared by descriptor, without a name or cleanup."""

import fcntl
import mmap
import os
import tempfile

from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.transport.session_progress import SessionProgress
from rlmesh_ray.transport.step_buffers import size_bytes

_SIZE_SEALS = 7  # F_SEAL_SEAL, F_SEAL_SHRINK and F_SEAL_GROW, which macOS does not have


def can_seal() -> bool:
    """Return whether the size of memory can be sealed (Linux), so that clients may map it."""
    return hasattr(os, "memfd_create")


def create_step_buffers(contract: EnvContract) -> int:
    return create_memory(size_bytes(contract))


def create_progress(num_lanes: int) -> int:
    return create_memory(SessionProgress.size_bytes(num_lanes))


def map_progress(descriptor: int, num_lanes: int) -> SessionProgress:
    """Map memory from ``create_progress``, and return the progress in it."""
    size = SessionProgress.size_bytes(num_lanes)
    return SessionProgress(memoryview(mmap.mmap(descriptor, size)), num_lanes)


def create_memory(size: int) -> int:
    """Return the descriptor of ``size`` bytes of new memory, all zeros.

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
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
