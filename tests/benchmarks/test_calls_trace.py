"""Which calls are counted: those that are the same in every run, and for every Python."""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import FunctionType

from benchmarks.calls.trace import Trace
from rlmesh_ray import polling


def numbers(count: int) -> list[int]:
    def each() -> Iterator[int]:
        yield from range(count)

    return [number for number in each()]  # noqa: C416  # a comprehension, and a generator


def as_ours(function: Callable[[int], object]) -> Callable[[int], object]:
    """Return the function as if it were one of the package."""
    assert isinstance(function, FunctionType)
    return FunctionType(function.__code__, {**function.__globals__, "__name__": "rlmesh_ray.ours"})


def test_starts_of_functions_of_the_package_are_counted_by_thread() -> None:
    counted = as_ours(numbers)
    key, equal = polling.WakeupDescriptors(1, 2), polling.WakeupDescriptors(1, 2)
    with Trace() as trace:
        counted(2)
        trace.start()
        counted(3)
        numbers(3)
        polling.keep_cpu()
        polling.no_work()
        assert key == equal
        thread = threading.Thread(target=counted, args=(1,))
        thread.start()
        thread.join()
        counts = trace.stop()
        counted(2)

    once = Counter({"rlmesh_ray.ours:numbers": 1, "rlmesh_ray.ours:numbers.<locals>.each": 1})
    assert counts == {
        threading.current_thread(): once + Counter({"rlmesh_ray.polling:keep_cpu": 1}),
        thread: once,
    }
    assert sys.getprofile() is None
