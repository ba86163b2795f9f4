"""The golden corpus: frames that real peers have sent, and what they mean.

A file is what went over one relay, in order, one frame a line: a JSON object with

* ``call``: service and method, such as ``env/Join``;
* ``way``: ``>`` to the server, ``<`` from it;
* ``frame``: the bytes as they were, in base64;
* ``means``: what this package reads in them, as plain JSON;
* ``packs``: whether this package, told the same, writes the same fields with the same bytes.

``capture`` makes the files. A change of a codec that alters what is read or written shows here.
"""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GENERATIONS = ("rlmesh_v1", "rlmesh_wire_v1")


@dataclass(frozen=True, slots=True)
class Frame:
    """One message, as it was on the wire."""

    call: str
    way: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Line:
    """A frame of the corpus with what is known of it."""

    frame: Frame
    means: Any
    packs: bool


def files(generation: str) -> list[Path]:
    """Return the sessions of ``generation``."""
    return sorted((HERE / generation).glob("*.jsonl"))


def read(path: Path) -> Iterator[Line]:
    """Yield the lines of a session."""
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        data = base64.b64decode(line["frame"])
        yield Line(Frame(line["call"], line["way"], data), line["means"], line["packs"])


def write(path: Path, lines: list[Line]) -> None:
    """Write a session."""
    told = (
        {
            "call": line.frame.call,
            "way": line.frame.way,
            "frame": base64.b64encode(line.frame.data).decode(),
            "means": line.means,
            "packs": line.packs,
        }
        for line in lines
    )
    text = "".join(
        json.dumps(line, separators=(",", ":"), ensure_ascii=False) + "\n" for line in told
    )
    path.write_text(text, encoding="utf-8")
