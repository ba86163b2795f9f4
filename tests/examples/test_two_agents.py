"""The example with several agents runs, with small settings, as its users run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_agents.py"


@pytest.mark.slow
@pytest.mark.ray
def test_two_agents(tmp_path: Path, ray_of_programs: dict[str, str]) -> None:
    small = ["--lanes", "2", "--iterations", "1", "--batch", "128"]

    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *small],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
        env={**os.environ, **ray_of_programs},
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "iteration 1: mean return of the scout -" in done.stdout
    assert "of the carrier -" in done.stdout
