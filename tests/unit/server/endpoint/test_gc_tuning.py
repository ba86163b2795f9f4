"""What the garbage collector has to look through in a process that serves."""

import subprocess
import sys

SCRIPT = """
import gc
from rlmesh_ray.server.endpoint.gc_tuning import freeze_heap

class Node:
    pass

def make_cycle():
    one, other = Node(), Node()
    one.other, other.one = other, one

def num_watched():
    return sum(type(each) is Node for each in gc.get_objects())

there = [Node() for _ in range(100)]
gc.disable()
before = num_watched()
freeze_heap()
after = num_watched()
make_cycle()
print(before, after, num_watched(), gc.collect() >= 2 and num_watched())
gc.enable()
looks = []
gc.callbacks.append(lambda phase, info: looks.append(phase))
under_way = [Node() for _ in range(2000)]
print(len(looks))
"""


def test_present_objects_are_not_collected_and_later_cycles_are() -> None:
    # In a process of its own: the collector would find what other tests have left here.
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == ["100", "0", "2", "0", "0"]
