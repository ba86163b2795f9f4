import subprocess
import sys

_SCRIPT = """
import threading
from concurrent.futures import ThreadPoolExecutor

from rlmesh_ray.server.endpoint import event_loop as loop

together = threading.Barrier(8)


def ask(_):
    together.wait()
    return id(loop.shared_loop())


with ThreadPoolExecutor(8) as pool:
    print(len(set(pool.map(ask, range(8)))))
"""


def test_threads_that_ask_first_at_the_same_time_get_the_same_loop() -> None:
    # In a process of its own: this one has its loop already. With a timeout, run() would sleep.
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True
    )

    assert done.stdout == "1\n"
