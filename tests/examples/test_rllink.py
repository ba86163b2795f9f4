"""The examples with simulators that connect run together, as their users run them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# As in their own texts: the training, and the two kinds of simulators.
TRAINING, SIMULATORS = "rllink_training.py", ("rllink_simulator.py", "per_action_simulator.py")


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def start(name: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / name), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A Ray that runs on this machine is not the test's.
        env={**os.environ, "RAY_ADDRESS": "local", "RLMESH_RAY_TOKEN": "s3cret"},
    )


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(
    "simulators", [SIMULATORS, SIMULATORS[1:]], ids=["both kinds", "only questions"]
)
@pytest.mark.timeout(300)
def test_rllib_learns_from_simulators(
    simulators: tuple[str, ...], processes: list[subprocess.Popen[str]]
) -> None:
    small = ["--iterations", "14", "--batch", "1024", "--simulators", str(len(simulators))]
    training = start(TRAINING, "--address", "127.0.0.1:0", *small)
    processes.append(training)
    assert training.stdout is not None
    address = training.stdout.readline().split()[-1]
    processes += [start(name, address) for name in simulators]

    output, errors = training.communicate(timeout=250)

    iterations = [line for line in output.splitlines() if line.startswith("iteration")]
    returns = [float(line.split()[-1]) for line in iterations]
    assert len(returns) == 14, errors
    assert max(returns) > 3 * returns[0]
    for process in processes[1:]:
        reported, errors = process.communicate(timeout=30)
        assert "the training is over" in reported, errors
