"""What trials found: a line for each row, on a page."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.chaos.history import Verdict

_HEAD = """# Trials of exactly-once

Faults at random moments, while a client steps environments whose observations prove what was done
to them: a step that is lost, done twice, answered with another one's answer, or stitched to another
episode is a violation. [Exactly once](../concepts/exactly_once.md) says why there should be none.

`ROWS=half_open SEED=1 make chaos` runs the rows whose names begin so; with
`PAGE=docs/benchmarks/trials.md` their lines are replaced here. Each line tells when it was written,
where, and by what. *Resumed* is the time from the beginning of a fault, which may itself last for
seconds, until the client was answered again; of drains and restarts, until they were done, too.
Before each fault over shared memory or TCP, of those into connections, processes, networks and
environments, a step has just taken a direct connection; a row in which none does fails.

"""
_COLUMNS = (
    *("fault", "client", "transport", "trials", "steps", "episodes", "cut short", "violations"),
    *("resumed, p95 s", "run"),
)
_TRANSPORTS = {"grpc": "messages", "shared_memory": "shared memory", "tcp": "TCP"}
"""For people."""
_NUM_KEYS = 3
"""Columns that name a row."""


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of fault, met by one kind of client over one transport."""

    fault: str
    client: str
    transport: str
    """What its steps travel by: a value of the EnvServer's ``transport``."""
    num_trials: int
    """In a full run."""

    @property
    def name(self) -> str:
        """What it is called on the command line and in files."""
        return f"{self.fault}-{self.client}-{self.transport}"


class RowNotRunError(Exception):
    """This machine lacks what the row needs."""


def result_line(row: Row, verdict: Verdict, resumed_s: Sequence[float], run: str) -> str:
    """Return the line of a row that has been run.

    Args:
        row: Which.
        verdict: What was found.
        resumed_s: After each fault, how long it took until the client was answered again.
        run: When it was, and by which command.
    """
    resumed = f"{np.quantile(resumed_s, 0.95):.2f}" if len(resumed_s) else "-"
    reported = "; ".join([run, *verdict.notes])
    counts = (verdict.num_faults, verdict.num_steps, verdict.num_episodes, verdict.num_lost)
    return _line((*_keys(row), *counts, len(verdict.violations), resumed, reported))


def line_of_none(row: Row, reason: str, run: str) -> str:
    """Return the line of a row that could not be run."""
    cells = ["not run", *["-"] * (len(_COLUMNS) - _NUM_KEYS - 2)]
    return _line((*_keys(row), *cells, f"{run}: {reason}"))


def head(explanations: Iterable[tuple[str, str]]) -> str:
    """Return what stands above the lines.

    Args:
        explanations: Faults and what they are.
    """
    listed = "".join(f"* `{name}`: {text}\n" for name, text in explanations)
    return f"{_HEAD}{listed}\n{_line(_COLUMNS)}{'|---' * len(_COLUMNS)}|\n"


def write_page(path: Path, above: str, rows: Sequence[Row], lines: Iterable[str]) -> None:
    """Put lines in the place of those that the page has of the same rows.

    Args:
        path: Of the page; it need not exist.
        above: What stands above the lines.
        rows: All there are, in their order; lines of others are dropped.
        lines: The new ones.
    """
    former = path.read_text().splitlines(keepends=True) if path.exists() else []
    by_row = {_first_cells(line): line for line in (*former, *lines) if line.startswith("|")}
    kept = [by_row[cells] for row in rows if (cells := _first_cells(_line(_keys(row)))) in by_row]
    path.write_text(above + "".join(kept))


def _keys(row: Row) -> tuple[str, ...]:
    return row.fault, row.client, _TRANSPORTS.get(row.transport, row.transport)


def _first_cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.split("|")[1 : _NUM_KEYS + 1])


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |\n"
