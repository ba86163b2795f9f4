"""Fault log: the stacks that faulthandler writes when a signal kills the worker.

It is anonymous memory that both processes have open: nothing has to be read while the worker lives,
and no file is left afterwards.
"""

import faulthandler
import os
import tempfile

_MAX_BYTES = 32 * 1024


def create() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rlmesh-ray-fault-log", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def enable(descriptor: int) -> None:
    """Write the stacks of all threads to ``descriptor`` when a signal kills this process."""
    os.set_inheritable(descriptor, False)
    faulthandler.enable(descriptor)


def read(descriptor: int) -> str:
    """Return the content; empty where no signal killed the process.

    pread leaves the file position alone, which both processes share.
    """
    return os.pread(descriptor, _MAX_BYTES, 0).decode("utf-8", "replace").strip()
