"""The example with a simulator that asks a ModelService runs, as its users run it, and learns."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NAME = "per_action_through_model_service.py"

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(ray_of_programs: dict[str, str]) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, str(EXAMPLES / NAME), *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **ray_of_programs, "RLMESH_RAY_TOKEN": "s3cret"},
            )
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_rllib_learns_from_who_only_asks_and_reports(start: Start) -> None:
    training = start("train", "--address", "127.0.0.1:0", "--iterations", "8", "--batch", "1024")
    assert training.stdout is not None
    address = training.stdout.readline().split()[-1]
    simulator = start("simulate", address)

    output, errors = training.communicate(timeout=250)

    iterations = [line for line in output.splitlines() if line.startswith("iteration")]
    returns = [float(line.split()[-1]) for line in iterations]
    assert len(returns) == 8, errors
    assert max(returns) > 2 * returns[0]
    reported, errors = simulator.communicate(timeout=30)
    assert "the training is over" in reported, errors
