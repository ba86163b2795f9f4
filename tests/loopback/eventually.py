"""How tests wait for what other processes and threads do."""

import os
import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    """Return whether ``condition`` has come true in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        os.sched_yield()
    return True
