"""The released rlmesh 0.1.0 can be measured: our raw client speaks enough of its wire.

It lives in a virtual environment of its own, which ``make`` builds.
"""

from pathlib import Path

import pytest

from benchmarks.serving.plan import Side
from benchmarks.serving.targets import Bench, Task

PYTHON = Path(__file__).parents[2] / ".venvs" / "released" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [Task(2), Task(2, is_one_stream=True), Task(2, rows=3)],
)
def test_its_predictions_are_counted(task: Task) -> None:
    assert PYTHON.exists(), "run `make .venvs/released/.ready` first (`make test-slow` does)"
    bench = Bench(warm_up_s=0.1, seconds=0.2, released_python=PYTHON)

    with bench.start(Side.RELEASED) as server:
        reading = bench.put(server, Side.RELEASED, task)

    assert reading.answers_per_s > 0
