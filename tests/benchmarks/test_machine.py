import subprocess
import sys

import pytest

from benchmarks.machine import (
    MachineTimes,
    StealClock,
    _families,
    describe,
    usable_cores,
    work_of,
)


def test_the_machine_is_named() -> None:
    described = describe()

    assert described.cpu
    assert described.cores >= 1
    assert described.date.endswith(" UTC")
    assert described.python.split()[1] == sys.version.split()[0]
    assert {"rlmesh-ray", "grpcio", "numpy"} <= set(described.packages)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells it in /proc")
def test_processor_time_of_the_machine_only_grows() -> None:
    # Not this process: what other tests have started may end between the two readings.
    worked = "import time\nwhile time.process_time() < 0.1: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", worked], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        before, after = work_of([[process.pid], []]), work_of([[process.pid], []])
        process.communicate(b"\n")

    assert before is not None
    assert after is not None
    assert 0 < before.groups_s[0] <= after.groups_s[0] <= after.all_s
    assert before.groups_s[1] == 0
    assert before.all_s <= after.all_s
    assert before.now_s < after.now_s
    assert usable_cores()


def test_steal_time_is_what_the_host_took_since_the_beginning() -> None:
    times = iter((MachineTimes(10.0, 0.0, 5.0), MachineTimes(12.0, 0.0, 6.0)))

    assert StealClock(lambda: next(times)).percent_of_a_core() == 50.0


def test_steal_time_is_not_known_where_the_system_does_not_report_it() -> None:
    assert StealClock(lambda: None).percent_of_a_core() is None


def test_a_process_that_is_gone_has_no_work() -> None:
    assert work_of([[2**30]]) is None


def test_the_work_of_a_process_is_also_that_of_all_whom_it_has_started() -> None:
    # The state, and who started it.
    stats = {1: ["S", "0"], 2: ["S", "1"], 3: ["R", "2"], 4: ["S", "0"], 5: ["S", "4"]}

    assert _families([1], stats) == {1, 2, 3}
    assert _families([2, 4], stats) == {2, 3, 4, 5}
