"""What a process says when it dies of a signal: the stacks that faulthandler writes.

Nameless memory that both processes hold: nothing has to be read while the process lives, and
nothing is left behind when it is gone.
"""

import faulthandler
import os
import tempfile

_MAX_BYTES = 32 * 1024


def create() -> int:
    """Return the descriptor of the memory, to be handed to the process."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rlmesh-ray-last-words", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def enable(descriptor: int) -> None:
    """Have the stacks of all threads written there when this process dies of a signal."""
    os.set_inheritable(descriptor, False)
    faulthandler.enable(descriptor)


def read(descriptor: int) -> str:
    """Return what the process said; empty when it died in silence.

    The position belongs to the process that writes, so that it must not be moved here.
    """
    return os.pread(descriptor, _MAX_BYTES, 0).decode("utf-8", "replace").strip()
