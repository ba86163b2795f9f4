"""``python -m benchmarks.page FILE``: writes what the benchmarks print with ``--json`` into a page.

A section of the page is a workload on a machine; one that is measured again replaces the former
one, and the others stay. Each has the date, the machine and how busy it was, and the command.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_HEAD = """# Figures

Written by `make bench`, not by hand: each section has the date, the machine and the command of its
last measurement there, the load before it, and the steal time during it: what a virtual machine's
host gave to its other guests. Medians; in brackets the quartiles, where there were several
repetitions. Below a rate stands the processor time of a step or message: of both ends together, and
the server's part. Only the ratios (columns with `/`) mean anything on another machine.
[Benchmarks](index.md) has the commands, and a summary of former measurements.
"""
_SECTION = re.compile(r"^## (.*)\n", re.MULTILINE)


def sections(lines: Iterable[str], command: str) -> Iterator[tuple[str, str]]:
    """Yield heading and text of each section that complete results give.

    Args:
        lines: JSON objects, one a line.
        command: The command that has printed them.
    """
    for line in lines:
        event = json.loads(line)
        if event["event"] == "result" and event["is_complete"]:
            where = f"{_machine(event)}, `{command}`\n"
            doubts = "".join(f"\n> {caveat}\n" for caveat in event["caveats"])
            for name, table in _tables(event).items():
                heading = f"{event['subject']}: {name}, {event['machine']['cpu']}"
                yield heading, f"\n{where}{doubts}\n{table}\n"


def _tables(event: Mapping[str, Any]) -> dict[str, str]:
    if event["subject"] == "learning":
        return {task["task"]: _task(task) for task in event["tasks"]}
    if event["subject"] == "recovery":
        seconds = {name: f"{event[f'{name}_s']:.2f}" for name in ("p50", "p95", "worst")}
        return {"seconds until a runner samples again": _table(list(seconds), [seconds.values()])}
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for finding in event["findings"]:
        groups.setdefault(finding["workload"], []).append(finding)
    return {workload: _findings(group) for workload, group in groups.items()}


def _findings(findings: list[Mapping[str, Any]]) -> str:
    columns = list(
        dict.fromkeys(
            (kind, name)
            for kind in ("sides", "comparisons")
            for finding in findings
            for name in finding[kind]
        )
    )
    rows = (
        [
            f"{finding['case']} ({finding['unit']})",
            *(_shown(finding[kind].get(name)) for kind, name in columns),
        ]
        for finding in findings
    )
    return _table(["", *(name for _, name in columns)], rows)


def _task(task: Mapping[str, Any]) -> str:
    head = ("seed", "env_steps", "iterations", "seconds", "return_mean")
    rows = ([run["sampler"], *(_number(run[name]) for name in head)] for run in task["runs"])
    return _table(["", *(name.replace("_", " ") for name in head)], rows)


def _shown(spread: Mapping[str, Any] | None) -> str:
    if spread is None:
        return ""
    low, high = map(_number, spread["quartiles"])
    is_one = len(spread["values"]) == 1
    costs = {"{} us CPU": spread.get("cpu_us"), "server {}": spread.get("server_cpu_us")}
    return "<br>".join(
        (
            _number(spread["median"]) + ("" if is_one else f" [{low}, {high}]"),
            *(
                text.format(_number(cost["median"]))
                for text, cost in costs.items()
                if cost and cost["median"]
            ),
        )
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _machine(event: Mapping[str, Any]) -> str:
    machine, steal = event["machine"], event["steal_percent"]
    names = ("grpcio", "ray", "torch", "rlmesh-ray")
    packages = [
        f"{name} {machine['packages'][name]}" for name in names if name in machine["packages"]
    ]
    return ", ".join(
        (
            machine["date"],
            f"{machine['cores']} cores of {machine['cpu']}",
            machine["python"],
            *packages,
            f"load before {_known(machine['load_average'])}",
            f"steal time {_known(steal, ' % of a core')}",
        )
    )


def _known(value: float | None, unit: str = "") -> str:
    return "unknown" if value is None else f"{value:g}{unit}"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = list(head)
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def updated(page: str, new: Mapping[str, str]) -> str:
    """Return the page with the sections replaced or added, in the order of their headings.

    Args:
        page: Its text; empty for a new one.
        new: Text by heading.
    """
    _, *parts = _SECTION.split(page)
    texts = {**dict(zip(parts[::2], parts[1::2], strict=True)), **new}
    body = "".join(f"\n## {heading}\n\n{text.strip()}\n" for heading, text in sorted(texts.items()))
    return _HEAD + body


def main() -> None:
    """Read standard input, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--command", required=True, help="What has printed the lines.")
    options = parser.parse_args()
    new = dict(sections(sys.stdin, options.command))
    if new:
        page = options.page.read_text() if options.page.exists() else ""
        options.page.write_text(updated(page, new))


if __name__ == "__main__":
    main()
