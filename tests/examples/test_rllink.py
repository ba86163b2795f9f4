"""The examples with simulators that connect run together, as their users run them."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# As in their own texts: the training, and the two kinds of simulators.
TRAINING, SIMULATORS = "rllink_training.py", ("rllink_simulator.py", "per_action_simulator.py")


@pytest.fixture
def start(ray_of_programs: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def run(name: str, *arguments: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, str(EXAMPLES / name), *arguments],
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
@pytest.mark.parametrize(
    "simulators",
    [
        pytest.param(SIMULATORS, id="both kinds"),
        pytest.param(SIMULATORS[1:], id="only questions", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.timeout(300)
def test_rllib_learns_from_simulators(
    simulators: tuple[str, ...], start: Callable[..., subprocess.Popen[str]]
) -> None:
    small = ["--iterations", "8", "--batch", "1024", "--simulators", str(len(simulators))]
    training = start(TRAINING, "--address", "127.0.0.1:0", *small)
    assert training.stdout is not None
    address = training.stdout.readline().split()[-1]
    processes = [start(name, address) for name in simulators]

    output, errors = training.communicate(timeout=250)

    iterations = [line for line in output.splitlines() if line.startswith("iteration")]
    returns = [float(line.split()[-1]) for line in iterations]
    assert len(returns) == 8, errors
    assert max(returns) > 2 * returns[0]
    for process in processes:
        reported, errors = process.communicate(timeout=30)
        assert "the training is over" in reported, errors
