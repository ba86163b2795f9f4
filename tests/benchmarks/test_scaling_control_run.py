"""What the processes of many endpoints are seen to work."""

import os
import subprocess
import sys

import pytest

from benchmarks.scaling.control_run import cores_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_a_process_that_ends_meanwhile_counts_for_nothing() -> None:
    worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    with cores_of({"workers": [worker.pid], "driver": [os.getpid()]}) as cores:
        worker.communicate(b"\n")

    assert cores["workers"] == 0.0
    assert cores["driver"] >= 0.0


def test_a_process_that_has_ended_before_is_no_error() -> None:
    worker = subprocess.Popen([sys.executable, "-c", ""])
    worker.wait()

    with cores_of({"workers": [worker.pid]}) as cores:
        pass

    assert cores == {"workers": 0.0}
