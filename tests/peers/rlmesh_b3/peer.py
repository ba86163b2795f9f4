"""Starts what runs in the virtual environment of rlmesh 0.1.0b3."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venvs" / "b3" / "bin" / "python"
EDITION_TEXT = "rlmesh-0.1.0b3"
TIMEOUT_S = 60.0


@contextmanager
def serving(script: str, *arguments: str) -> Iterator[str]:
    """Run a server of b3; yield its address."""
    process = subprocess.Popen(
        _command(script, *arguments),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address, f"{script} ended with {process.wait(TIMEOUT_S)}"
            yield address
        finally:
            process.kill()


def drive(address: str, kind: str) -> subprocess.CompletedProcess[str]:
    """Let b3's clients drive the endpoint at ``address``; ``kind`` is as ``drive.py`` has it."""
    return subprocess.run(
        _command("drive", address, kind),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def _command(script: str, *arguments: str) -> list[str]:
    assert PYTHON.exists(), "run `make .venvs/b3/.ready` first (`make test` does)"
    return [str(PYTHON), "-m", f"tests.peers.rlmesh_b3.{script}", *arguments]
