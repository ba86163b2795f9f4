"""A seeded sample of mutants of each room, tried against unit tests: ``make mutants``.

mutmut mutates the rooms that ``[tool.mutmut]`` in pyproject.toml names, in a copy under
``mutants/``, and runs the tests that reach the mutated function. It keeps the results there: the
next run with the same seed tries only the mutants that have none; ``mutmut run NAME`` tries one
again, after a new test. ``mutmut show NAME`` prints a mutant. ``MUTANT_UNDER_TEST=NAME python -m
pytest FILE``, in ``mutants/``, tries it against other tests.
"""

import argparse
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from mutmut.__main__ import create_mutants
from mutmut.mutation.data import SourceFileMutationData
from mutmut.stats import status_by_exit_code
from mutmut.utils.file_utils import (
    copy_also_copy_files,
    copy_src_dir,
    walk_mutatable_files,
)

NOT_KILLED = {"survived", "no tests"}


def statuses() -> dict[str, str]:
    """Return the status of each mutant, by its name."""
    found: dict[str, str] = {}
    for path in sorted(walk_mutatable_files()):
        data = SourceFileMutationData(path=path)
        data.load()
        found |= {name: status_by_exit_code[code] for name, code in data.exit_code_by_key.items()}
    return found


def rooms(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of mutants by room, sorted."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        found.setdefault(name.split(".")[1], []).append(name)
    return dict(sorted(found.items()))


def main() -> None:
    """Try the sample; print the figures and the mutants that no test has killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--number", type=int, default=300, help="mutants of all rooms together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--room", action="append", help="only this one; repeatable")
    args = parser.parse_args()

    Path("mutants").mkdir(exist_ok=True)
    copy_src_dir()
    copy_also_copy_files()
    create_mutants(1)
    status = statuses()
    chosen = {room: each for room, each in rooms(status).items() if room in (args.room or [room])}
    sample: list[str] = []
    for names in chosen.values():
        # A larger number extends the sample, and other rooms do not change it.
        random.Random(args.seed).shuffle(names)
        sample += names[: args.number // len(chosen)]
    untried = [name for name in sample if status[name] == "not checked"]
    if untried:
        command = [str(Path(sys.executable).with_name("mutmut")), "run", "--max-children", "1"]
        subprocess.run([*command, *untried], check=True)
        status = statuses()

    sys.stdout.write(f"{len(sample)} of {len(status)} mutants, seed {args.seed}\n")
    for room, names in rooms(sample).items():
        counts = Counter(status[name] for name in names)
        killed = 1 - sum(counts[each] for each in NOT_KILLED) / len(names)
        shown = ", ".join(f"{count} {result}" for result, count in sorted(counts.items()))
        sys.stdout.write(f"{room:12} {len(chosen[room]):6} {killed:6.1%} killed: {shown}\n")
    for name in sorted(sample):
        if status[name] in NOT_KILLED:
            sys.stdout.write(f"{status[name]}: {name}\n")


if __name__ == "__main__":
    main()
