"""A bounded, reproducible run of every fuzz target; `make fuzz` runs them for longer."""

import multiprocessing
import os
import platform
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
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


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """A process with one thread: tracemalloc counts all threads, such as Ray's after its tests."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("name", TARGETS)
def test_work_and_memory_stay_within_a_multiple_of_the_bytes(
    name: str, process: ProcessPoolExecutor
) -> None:
    for beginning, num_bytes, peak_bytes, num_calls in process.submit(costs_of, name).result():
        assert peak_bytes < 2**20 + BYTES_PER_BYTE * num_bytes, (num_bytes, beginning)
        assert num_calls < 10_000 + CALLS_PER_BYTE * num_bytes, (num_bytes, beginning)


def costs_of(name: str) -> list[tuple[bytes, int, int, int]]:
    """Return what a target costs for each of its bulky inputs.

    Returns:
        For each input its beginning, its bytes, the most bytes that are allocated at a time, and
        the number of calls.
    """
    target = TARGETS[name]
    # What is made once: caches, and packages that are imported when they are needed.
    for seed in target.seeds():
        target.run(seed)
    inputs = bulky_inputs(target, BULK_BYTES, random.Random(7))
    return [(data[:200], len(data), *_cost(target.run, data)) for data in inputs]


def _cost(run: Callable[[bytes], object], data: bytes) -> tuple[int, int]:
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
