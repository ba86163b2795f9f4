"""Settings of Python's garbage collector for a process that only serves.

A full collection examines all objects, half a million once torch and RLlib have been imported,
whenever pending requests have made the rest a quarter larger. Every client waits meanwhile, 100 ms
and more, and it finds nothing: an endpoint keeps what it loads, and requests leave no cycles.
"""

import gc

_YOUNG = 5_000
"""Number of new objects that starts a collection of the youngest generation. Python's default is
700; a hundred pending requests have more: it ran fifty times a second."""


def freeze_heap() -> None:
    """Exclude all present objects from collection, and collect the others less often.

    For a process of this package's own that has loaded what it serves: present objects that later
    become garbage in a cycle are never freed. A program that also trains would miss that memory.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])
