"""Real simulators: each is hosted, stepped, and trained on, or refused for the expected reason.

``make nightly`` runs it. The simulators are in a virtual environment of their own, which has the
base install of this package; RLlib trains from this one, over an endpoint. What was seen goes to
standard output, and with ``--page FILE`` into a table of Markdown. The exit code is 1 if any
simulator failed.
"""

import argparse
import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.simulators.compare import NUM_STEPS
from tests.simulators.factories import NAMES

ROOT = Path(__file__).parents[2]
SIMULATORS = ROOT / ".venvs" / "simulators" / "bin" / "python"
NUM_ITERATIONS = 2
NOT_COMPARED = {"rock_paper_scissors": "several agents"}
"""By simulator: why it takes no steps in a vector of gymnasium's."""
NOT_TRAINED = {
    "minigrid": "observations Dict('direction'",
    "franka_kitchen": "observations Dict('achieved_goal'",
    "vizdoom": "observations Dict('",
    "rock_paper_scissors": "one policy for one agent",
}
"""By simulator: what ``rlmesh-ray train`` answers."""
# Small: the simulators are tried here, not the learning, and some take a tenth of a second a step.
_SETTINGS = ("train_batch_size_per_learner=400", "minibatch_size=100", "num_epochs=2")
_START_LIMIT_S = 120.0
_STOP_LIMIT_S = 30.0
_LIMIT_S = 600.0
_LONGEST_CELL = 300
_HEAD = f"""# Simulators

What `make nightly` saw: each simulator hosted by an endpoint, compared with itself in the same
process for {NUM_STEPS} steps with the same seed and actions, and trained on for {NUM_ITERATIONS}
iterations of PPO (`rlmesh-ray train ADDRESS --stop-iters {NUM_ITERATIONS}`, with small batches),
or why not. Versions are those of `tests/simulators/requirements.txt`.

| simulator | equal steps | training |
|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that has ended; ``returncode`` None: it was killed at its time limit."""

    returncode: int | None
    stdout: str = ""
    stderr: str = ""

    @property
    def last_event(self) -> dict[str, Any]:
        """The JSON object of the last line on standard output; empty if that is none."""
        try:
            event = json.loads(_last_line(self.stdout))
        except ValueError:
            return {}
        return event if isinstance(event, dict) else {}

    @property
    def fault(self) -> str:
        """What went wrong, as a table's cell."""
        if self.returncode is None:
            return failed(f"not done within {_LIMIT_S:g} s")
        reason = self.last_event.get("message") or _last_line(self.stderr)
        return failed(reason or f"exit code {self.returncode}, without a message")


def failed(reason: str) -> str:
    """Return the cell of a table that makes the run fail."""
    return f"FAILED: {_cell(reason)}"


def comparison_cell(name: str, finished: Finished) -> str:
    """Return how many steps were equal, or that there were too few."""
    event = finished.last_event
    if finished.returncode != 0 or "steps" not in event:
        return finished.fault
    steps, reason = event["steps"], event["reason"]
    expected = NOT_COMPARED.get(name)
    if expected is not None:
        is_expected = steps == 0 and expected in reason
        return _cell(f"none: {reason}") if is_expected else failed(f"{steps}, not {expected!r}")
    if steps < NUM_STEPS:
        return failed(f"{steps} of {NUM_STEPS} steps were equal: {reason}")
    return str(steps)


def training_cell(name: str, finished: Finished) -> str:
    """Return how much was trained, or the refusal, which must be the expected one."""
    event, expected = finished.last_event, NOT_TRAINED.get(name)
    if expected is not None:
        message = str(event.get("message", ""))
        if event.get("type") == "ConfigurationError" and expected in message:
            return _cell(f"refused: {message}")
        return failed(f"not refused with {expected!r}, but {event or finished.fault}")
    if finished.returncode != 0 or event.get("event") != "result":
        return finished.fault
    iterations, steps, lost = event["iterations"], event["env_steps"], event["sessions_lost"]
    if iterations < NUM_ITERATIONS or not steps or lost:
        return failed(f"{iterations} iterations, {steps:,} steps, {lost} lost sessions")
    return f"{iterations} iterations, {steps:,} steps"


def exit_code(rows: Iterable[str]) -> int:
    """Return 1 if one of the table's rows holds a failure."""
    return int(any("FAILED" in row for row in rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all simulators, or those that are named; return the exit code."""
    parser = argparse.ArgumentParser(description="Host, compare and train real simulators.")
    parser.add_argument("names", nargs="*", default=NAMES, help=f"Of {', '.join(NAMES)}.")
    parser.add_argument("--page", type=Path, help="A Markdown file to write.")
    options = parser.parse_args(arguments)
    rows = []
    for name in options.names:
        rows.append(f"| {name} | {_compared(name)} | {_trained(name)} |")
        sys.stdout.write(f"{rows[-1]}\n")
        sys.stdout.flush()
    if options.page is not None:
        options.page.parent.mkdir(parents=True, exist_ok=True)
        options.page.write_text(_HEAD + "".join(f"{row}\n" for row in rows))
    return exit_code(rows)


def _compared(name: str) -> str:
    command = [str(SIMULATORS), "-m", "tests.simulators.compare", name]
    return comparison_cell(name, _run(command))


def _trained(name: str) -> str:
    with tempfile.TemporaryDirectory() as folder, _served(name) as event:
        if event.get("event") != "serving":
            return failed(f"not served: {event.get('message', 'the endpoint ended')}")
        command = [sys.executable, "-m", "rlmesh_ray", "train", event["address"], "--json"]
        command += ["--stop-iters", str(NUM_ITERATIONS), "--checkpoint-dir", folder]
        for setting in _SETTINGS:
            command += ["--set", setting]
        return training_cell(name, _run(command))


@contextmanager
def _served(name: str) -> Iterator[dict[str, Any]]:
    """Serve a simulator; give what the endpoint says first."""
    serve = ["serve-env", f"tests.simulators.factories:{name}", "--json"]
    server = subprocess.Popen(
        [str(SIMULATORS), "-m", "rlmesh_ray", *serve],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with server:
        try:
            yield _first_event(server)
        finally:
            server.terminate()
            try:
                server.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                server.kill()


def _first_event(server: subprocess.Popen[str]) -> dict[str, Any]:
    assert server.stdout is not None
    if not select.select([server.stdout], [], [], _START_LIMIT_S)[0]:
        return {"message": f"the endpoint did not start within {_START_LIMIT_S:g} s"}
    return Finished(None, server.stdout.readline()).last_event


def _run(command: Sequence[str]) -> Finished:
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Finished(None)
    return Finished(done.returncode, done.stdout, done.stderr)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def _cell(text: str) -> str:
    """Return ``text`` so that it breaks no row of the table."""
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= _LONGEST_CELL else f"{line[:_LONGEST_CELL].rpartition(' ')[0]} …"


if __name__ == "__main__":
    sys.exit(main())
