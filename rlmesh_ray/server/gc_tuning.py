"""What Python's garbage collector costs a process that only serves.

It looks through everything that is there, half a million objects once torch and RLlib have been
imported, whenever requests that are under way have made the rest a quarter larger. Every client
waits meanwhile, 100 ms and more, and what it looks for is not there: what the endpoint loads, it
keeps; what a request leaves behind has no cycles.
"""

import gc

_YOUNG = 5_000
"""Objects after which it looks at the newest ones. By itself it would do so at 700, of which some
hundred requests on their way have more: it looked fifty times a second."""


def freeze_heap() -> None:
    """Have the collector leave alone whatever is there now, and look at the rest less often.

    For a process of this package's own that has loaded what it serves: what becomes garbage in a
    cycle later, of what is there now, stays. A program that also trains would miss that memory.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])
