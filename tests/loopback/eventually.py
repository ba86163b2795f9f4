"""How tests wait for what other processes and threads do; tests in all folders use this."""

import time
from collections.abc import Callable

# What is waited for runs on the same few cores, or in this very process: who looks without a pause
# keeps a core and the interpreter's lock from it.
_PAUSE_S = 0.01


def eventually(condition: Callable[[], object], timeout_s: float = 60.0) -> bool:
    """Return whether ``condition`` has come true in time; it may be looked at often."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_PAUSE_S)
    return True
