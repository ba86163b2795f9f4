"""Real simulators: each is hosted, stepped, and trained on, or refused with a reason.

``make nightly`` runs it. The simulators are in a virtual environment of their own, which has the
base install of this package; RLlib trains from this one, over an endpoint. What was seen goes to
standard output, and with ``--page FILE`` into a table of Markdown.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlmesh_ray import errors
from tests.simulators.factories import NAMES

ROOT = Path(__file__).parents[2]
SIMULATORS = ROOT / ".venvs" / "simulators" / "bin" / "python"
_TIMEOUT_S = 600.0
_HEAD = """# Simulators

What `make nightly` saw: each simulator hosted by an endpoint, compared with itself in the same
process for 500 steps with the same seed and actions, and trained on for two iterations of PPO
(`rlmesh-ray train ADDRESS --stop-iters 2`), or why not.

| simulator | equal steps | training |
|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Seen:
    """What became of one simulator."""

    name: str
    steps: str
    training: str

    @property
    def row(self) -> str:
        """As a row of the page's table."""
        return f"| {self.name} | {self.steps} | {self.training} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all, or those that are named; return 1 if one was neither trained on nor refused."""
    parser = argparse.ArgumentParser(description="Host, compare and train real simulators.")
    parser.add_argument("names", nargs="*", default=NAMES, help=f"Of {', '.join(NAMES)}.")
    parser.add_argument("--page", type=Path, help="A Markdown file to write.")
    options = parser.parse_args(arguments)
    table = []
    for name in options.names:
        seen = Seen(name, _compared(name), _trained(name))
        sys.stdout.write(f"{seen.row}\n")
        sys.stdout.flush()
        table.append(seen)
    if options.page is not None:
        options.page.write_text(_HEAD + "".join(f"{seen.row}\n" for seen in table))
    return int(any("FAILED" in seen.row for seen in table))


def _compared(name: str) -> str:
    done = subprocess.run(
        [str(SIMULATORS), "-m", "tests.simulators.compare", name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        return f"FAILED: {_last_line(done.stderr)}"
    found = json.loads(done.stdout.splitlines()[-1])
    return f"{found['steps']}" + (f" ({found['reason']})" if found["reason"] else "")


def _trained(name: str) -> str:
    serve = ["serve-env", f"tests.simulators.factories:{name}", "--json"]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [str(SIMULATORS), "-m", "rlmesh_ray", *serve],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as server,
    ):
        try:
            assert server.stdout is not None
            first = json.loads(server.stdout.readline() or "{}")
            if first.get("event") != "serving":
                return f"not served: {first.get('message', 'the endpoint did not start')}"
            return _outcome(first["address"], folder)
        finally:
            server.terminate()


def _outcome(address: str, folder: str) -> str:
    train = ["train", address, "--stop-iters", "2", "--checkpoint-dir", folder, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "rlmesh_ray", *train],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    events = [json.loads(line) for line in done.stdout.splitlines()]
    last = events[-1] if events else {}
    if last.get("event") == "result":
        return f"{last['iterations']} iterations, {last['env_steps']:,} steps"
    if last.get("event") == "error" and hasattr(errors, last["type"]):
        return f"refused: {last['message']}"
    return f"FAILED: {_last_line(done.stderr)}"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "without a word"


if __name__ == "__main__":
    sys.exit(main())
