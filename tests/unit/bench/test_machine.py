import os
import sys

import pytest

from rlmesh_ray.bench.machine import describe, usable_cores, work_of


def test_the_machine_is_named() -> None:
    machine = describe()

    assert machine.cpu
    assert machine.cores >= 1
    assert machine.python.split()[1] == sys.version.split()[0]
    assert {"rlmesh-ray", "grpcio", "numpy"} <= set(machine.packages)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells it in /proc")
def test_processor_time_of_the_machine_only_grows() -> None:
    before, after = work_of(os.getpid()), work_of(os.getpid())

    assert before is not None
    assert after is not None
    assert 0 < before.process_s <= after.process_s <= after.all_s
    assert before.all_s <= after.all_s
    assert before.now_s < after.now_s
    assert usable_cores()


def test_a_process_that_is_gone_has_no_work() -> None:
    assert work_of(2**30) is None
