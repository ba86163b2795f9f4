"""A bounded, reproducible run of every fuzz target; `make fuzz` runs them for longer."""

import os
import platform
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
NUM_RUNS = 1500
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
