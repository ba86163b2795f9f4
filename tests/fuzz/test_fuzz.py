"""A bounded, reproducible run of every fuzz target; `make fuzz` runs them for longer."""

import os
import platform
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz.bulk import bulky_inputs
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
NUM_RUNS = 1500
BULK_BYTES = 2**14
BYTES_PER_BYTE = 256
"""Two bytes can be a part of a message, for which Python makes an object of some hundred."""
CALLS_PER_BYTE = 64
# As in pyproject.toml: where atheris has wheels, it has to be there.
HAS_ATHERIS = (
    sys.platform == "linux" and platform.machine() == "x86_64" and sys.version_info < (3, 14)
)


@pytest.mark.parametrize("name", TARGETS)
def test_the_seeds_and_frames_near_them_are_read_or_refused(name: str) -> None:
    target, chance = TARGETS[name], random.Random(5)

    for seed in target.seeds():
        target.run(seed)
        for _ in range(20):
            target.run(target.mutate_frame(seed, chance))


@pytest.mark.parametrize("name", TARGETS)
def test_work_and_memory_stay_within_a_multiple_of_the_bytes(name: str) -> None:
    target, chance = TARGETS[name], random.Random(7)
    # What is made once: caches, and packages that are imported when they are needed.
    for seed in target.seeds():
        target.run(seed)

    for data in bulky_inputs(target, BULK_BYTES, chance):
        most_bytes = 2**20 + BYTES_PER_BYTE * len(data)
        # Other threads of the process count, too, such as Ray's after other tests: they come and
        # go, and what the target holds is the same each time.
        costs = (cost_of(target.run, data) for _ in range(5))
        cost = next((each for each in costs if each[0] < most_bytes), None)

        assert cost is not None, (len(data), data[:200])
        assert cost[1] < 10_000 + CALLS_PER_BYTE * len(data), (len(data), data[:200])


def cost_of(run: Callable[[bytes], object], data: bytes) -> tuple[int, int]:
    """Return the most bytes that ``run(data)`` holds at a time, and how many calls it makes."""
    num_calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    tracemalloc.start()
    sys.setprofile(count)
    try:
        run(data)
        return tracemalloc.get_traced_memory()[1], num_calls
    finally:
        sys.setprofile(None)
        tracemalloc.stop()


@pytest.mark.nightly
@pytest.mark.skipif(not HAS_ATHERIS, reason="atheris has no wheels for this platform")
@pytest.mark.parametrize("name", TARGETS)
def test_fuzzing_finds_nothing(name: str, tmp_path: Path) -> None:
    options = [f"-runs={NUM_RUNS}", "-seed=1", "-max_len=4096", "-timeout=20"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.fuzz", name, str(tmp_path / "corpus"), *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=100,
        check=False,
    )

    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert f"Done {NUM_RUNS} runs" in done.stderr
