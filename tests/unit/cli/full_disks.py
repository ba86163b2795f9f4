"""Files that cannot grow."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """Limit the size of files, as ``ulimit -f`` does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
