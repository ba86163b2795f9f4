"""The example is run with simulators that come and go on a machine with a network of its own.

In that network is the base install, without Ray and torch. See test_simulator_on_another_machine.
"""

import contextlib
import ipaddress
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples.test_simulator_on_another_machine import (
    BASE,
    PLACE,
    ROOT,
    Machine,
    network_namespace,
)

EXAMPLE = ROOT / "examples" / "pool_of_simulators.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.ray]


@pytest.fixture(scope="module", params=[PLACE])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    if request.param != "network namespace":
        yield Machine("127.0.0.1")
        return
    with network_namespace() as made:
        yield made


@contextlib.contextmanager
def example(machine: Machine, folder: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Run the example; also return where simulators register."""
    # The other end of the link.
    here = str(ipaddress.ip_address(machine.host) - 1) if machine.prefix else machine.host
    command = [
        sys.executable, str(EXAMPLE), "--address", f"{here}:0", "--token-file", "pool-token",
        "--iterations", "6", "--batch", "256", "--sessions", "2", "--wait-for", "2",
    ]  # fmt: skip
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=folder,
        # A Ray that runs on this machine is not the test's.
        env={**os.environ, "RAY_ADDRESS": "local"},
    ) as process:
        try:
            place = line_with(process, "waiting for:").partition("--register ")[2].split()[0]
            assert place.startswith(f"simulators@{here}:")
            yield process, place
        finally:
            process.kill()


@contextlib.contextmanager
def simulator(machine: Machine, folder: Path, place: str, endpoint_id: str) -> Iterator[None]:
    """Serve from ``machine``, as the example tells to, until the block ends."""
    assert BASE.exists(), "run `make .venvs/base/.ready` first (`make test-slow` does)"
    command = [
        *machine.prefix, str(BASE), "serve-env", "CartPole-v1", "--num-envs", "4", "--json",
        "--address", f"{machine.host}:0", "--register", place, "--pool-token-file", "pool-token",
        "--endpoint-id", endpoint_id,
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=folder
    ) as process:
        try:
            line_with(process, '"registered"')
            yield
        finally:
            process.kill()


def line_with(process: "subprocess.Popen[str]", words: str) -> str:
    """Return the next line that has ``words`` in it."""
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return line
    raise AssertionError(f"it has ended without {words!r}")


def test_it_trains_while_simulators_are_killed_and_started(
    machine: Machine, tmp_path: Path
) -> None:
    (tmp_path / "pool-token").write_text("s3cret\n")
    (tmp_path / "pool-token").chmod(0o600)
    with (
        example(machine, tmp_path) as (process, place),
        simulator(machine, tmp_path, place, "stays"),
    ):
        with simulator(machine, tmp_path, place, "leaves"):
            first = line_with(process, "iteration 1:")
            # Or it may have done all iterations before the next simulator is there.
            process.send_signal(signal.SIGSTOP)
        with simulator(machine, tmp_path, place, "joins"):
            process.send_signal(signal.SIGCONT)
            last = line_with(process, "iteration 6:")
            code = process.wait(timeout=60)

    assert set(first.rpartition(": ")[2].split()) == {"stays", "leaves"}
    assert "stays" in last.rpartition(": ")[2].split()
    assert "leaves" not in last
    assert code == 0


def test_the_simulators_machine_has_no_ray() -> None:
    done = subprocess.run(
        [str(BASE), "pool", "simulators"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    assert "a pool needs ray, which the base install does not have" in done.stderr
