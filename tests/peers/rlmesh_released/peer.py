"""Starts what runs in the virtual environment of the released rlmesh 0.1.0."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venvs" / "released" / "bin" / "python"
TIMEOUT_S = 60.0


@contextmanager
def serving(script: str, *arguments: object) -> Iterator[str]:
    """Run one of the scripts that serve; yield its address."""
    process = subprocess.Popen(
        command(script, *arguments),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
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


def drive(script: str, task: str, **arguments: object) -> Any:
    """Let one of the scripts that drive do ``task``; return what it tells."""
    done = subprocess.run(
        command(script, task, json.dumps(arguments)),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@contextmanager
def driving(script: str, task: str, **arguments: object) -> Iterator["subprocess.Popen[str]"]:
    """Start a script that drives; it goes on beside the test, which may talk with it."""
    process = subprocess.Popen(
        command(script, task, json.dumps(arguments)),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def command(script: str, *arguments: object) -> list[str]:
    """Return the command line of one of the scripts beside this module."""
    assert PYTHON.exists(), "run `make .venvs/released/.ready` first (`make test-slow` does)"
    module = f"tests.peers.rlmesh_released.{script}"
    return [str(PYTHON), "-W", "ignore", "-m", module, *map(str, arguments)]
