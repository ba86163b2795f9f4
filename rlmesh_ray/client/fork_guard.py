"""Sessions belong to the process that has opened them.

A fork must not use them, they are not pickled, and they are closed when the process ends.
"""

import atexit
import contextlib
import time
import weakref
from typing import Any, NoReturn

from rlmesh_ray.errors import EndpointLostError
from rlmesh_ray.options import FORK_REMEDY

_EXIT_TIMEOUT_S = 3.0
"""After how long no further session is closed when the process ends."""


def forked(pid: int, address: str) -> EndpointLostError:
    """Return the error for the use of a session in a fork of process ``pid``, which opened it.

    A fork has a copy of the session, on the same memory and the same connection: its requests would
    be executed in its parent's episodes, and its parent would miss the answers.
    """
    return EndpointLostError(
        f"the session belongs to process {pid}, of which this one is a fork: open one in each "
        f"process, and {FORK_REMEDY}",
        address,
    )


class NotPicklable:
    """Refuses to be pickled or copied, as Ray does with the arguments of a task."""

    @property
    def address(self) -> str:
        """The address of the endpoint."""
        raise NotImplementedError

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} is a session and stays in its process; hand on its address, "
            f"{self.address!r}, and open another one there"
        )


_open_sessions: weakref.WeakSet[Any] = weakref.WeakSet()


def close_at_exit(session: Any) -> None:
    """Close a session when the process ends, so that its endpoint does not report a lost client.

    Its ``close`` has to do nothing in a fork. This does not keep the session alive.
    """
    _open_sessions.add(session)


@atexit.register
def _close_all() -> None:
    end_s = time.monotonic() + _EXIT_TIMEOUT_S
    for session in list(_open_sessions):
        if time.monotonic() < end_s:
            with contextlib.suppress(Exception):
                session.close()
