"""The example is run against a simulator that has a network of its own, as another machine has.

A network namespace stands for that machine: nothing of this one can be reached from it except
over the link between the two. In it runs the base install, without Ray and torch. Where
namespaces cannot be made, the same happens over loopback, and the tests' ids say so.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "simulator_on_another_machine.py"
BASE = ROOT / ".venvs" / "base" / "bin" / "rlmesh-ray"
SMALL = ["--iterations", "1", "--batch", "256"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # training starts a Ray each time


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the simulator runs."""

    host: str
    """Its address."""
    prefix: tuple[str, ...] = ()
    """Stands before each command that is to run there."""


def has_namespaces() -> bool:
    """Return whether this process may make networks; trying leaves nothing behind."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        return False
    trial = ["unshare", "--net", "ip", "link", "add", "here", "type", "veth", "peer", "there"]
    return subprocess.run(trial, capture_output=True, timeout=30, check=False).returncode == 0


PLACE = "network namespace" if has_namespaces() else "loopback, for want of network namespaces"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


@contextlib.contextmanager
def network_namespace() -> Iterator[Machine]:
    """Make a machine with an address of its own, in a net of two; remove it afterwards."""
    number = os.getpid()
    name, here, there = f"rlmesh-{number}", f"rlm{number}a", f"rlm{number}b"
    # RFC 2544 leaves these addresses to tests.
    network, address = f"198.18.{number // 64 % 256}", number % 64 * 4
    ip("netns", "add", name)
    try:
        # The namespace takes its end of the link with it when it goes, and so the link.
        ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
        ip("address", "add", f"{network}.{address + 1}/30", "dev", here)
        ip("link", "set", here, "up")
        ip("-n", name, "address", "add", f"{network}.{address + 2}/30", "dev", there)
        ip("-n", name, "link", "set", there, "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield Machine(f"{network}.{address + 2}", ("ip", "netns", "exec", name))
    finally:
        ip("netns", "delete", name)


@pytest.fixture(scope="module", params=[PLACE])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    if request.param != "network namespace":
        yield Machine("127.0.0.1")
        return
    with network_namespace() as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where both machines find the token, and its opposite."""
    for name, token in {"token": "s3cret\n", "wrong-token": "secret\n"}.items():
        (tmp_path / name).write_text(token)
        (tmp_path / name).chmod(0o600)
    return tmp_path


@contextlib.contextmanager
def simulator(machine: Machine, folder: Path, *options: str) -> Iterator[str]:
    """Run an endpoint on ``machine`` until the block ends; return its address."""
    assert BASE.exists(), "run `make .venvs/base/.ready` first (`make test-slow` does)"
    command = [
        *machine.prefix, str(BASE), "serve-env", "CartPole-v1", "--num-envs", "4",
        "--address", f"{machine.host}:0", "--token-file", "token", *options, "--json",
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=folder
    ) as process:
        try:
            assert process.stdout is not None
            serving = json.loads(process.stdout.readline())
            is_apart = network_of(process.pid) != network_of(os.getpid())
            assert is_apart == bool(machine.prefix)
            yield serving["address"]
        finally:
            process.terminate()
            assert process.wait(timeout=30) == 0


def network_of(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def train(
    *arguments: str, folder: Path, variables: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments, *SMALL],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
        env={**os.environ, **variables},
        check=False,
    )


def is_one_error(done: subprocess.CompletedProcess[str], *words: str) -> bool:
    (line,) = done.stderr.splitlines()
    return (
        done.returncode == 1 and line.startswith("error: ") and all(map(line.__contains__, words))
    )


@pytest.mark.ray
@pytest.mark.nightly
def test_it_trains_over_the_network(
    machine: Machine, folder: Path, ray_of_programs: dict[str, str]
) -> None:
    with simulator(machine, folder) as address:
        done = train(address, "--token-file", "token", folder=folder, variables=ray_of_programs)

    assert address.startswith(f"{machine.host}:")
    assert done.returncode == 0, done.stderr
    assert "iteration 1: mean return" in done.stdout


def test_a_wrong_token_is_reported_in_one_line(machine: Machine, folder: Path) -> None:
    with simulator(machine, folder) as address:
        done = train(address, "--token-file", "wrong-token", folder=folder)

    assert is_one_error(done, address, "token"), done.stderr


@pytest.mark.ray
@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_it_trains_over_tls_and_not_without(
    machine: Machine, folder: Path, ray_of_programs: dict[str, str]
) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-subj", "/CN=simulator", "-addext", f"subjectAltName=IP:{machine.host}",
         "-keyout", "key.pem", "-out", "certificate.pem"],
        cwd=folder, check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    options = ["--tls-cert", "certificate.pem", "--tls-key", "key.pem"]
    token = ["--token-file", "token"]

    with simulator(machine, folder, *options) as address:
        encrypted = [*token, "--tls-ca", "certificate.pem", "--runners", "0"]
        done = train(address, *encrypted, folder=folder, variables=ray_of_programs)
        in_the_clear = train(address, *token, folder=folder)  # ends before Ray starts

    assert done.returncode == 0, done.stderr
    assert "iteration 1: mean return" in done.stdout
    assert is_one_error(in_the_clear, address), in_the_clear.stderr
