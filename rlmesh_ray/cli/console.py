"""Output of the command line: tables for people, or one JSON object a line for programs.

Rule of the file: with ``--json`` standard output has events and nothing else; text for people goes
to standard error then.
"""

import contextlib
import json
import math
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rlmesh_ray.errors import printable

# A command that takes longer than this over one thing says what it is doing.
_SILENCE_S = 3.0
# Width of logs and pipes, which have none of their own: enough for an address and a path.
_WIDTH_OF_A_FILE = 120


class SafeConsole(RichConsole):
    """A rich console that prints text literally, since it may come from a peer.

    Characters that control a terminal are escaped; markup and names of emojis are not interpreted.

    Args:
        is_stderr: Whether it writes to standard error.
    """

    def __init__(self, *, is_stderr: bool) -> None:
        stream = sys.stderr if is_stderr else sys.stdout
        width = None if stream.isatty() else _WIDTH_OF_A_FILE
        super().__init__(stderr=is_stderr, width=width, highlight=False, markup=False, emoji=False)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; text that standard error does not take is lost, which is not a failure."""
        try:
            super().print(*objects, **options)
        except OSError:
            if not self.stderr:
                raise

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


class Console:
    """Prints text for people and events for programs.

    Args:
        is_json: Whether a program reads standard output.
    """

    def __init__(self, *, is_json: bool = False) -> None:
        self.is_json = is_json
        self.has_json_log = False
        """Whether a program reads standard error, too."""
        self._programs = sys.stdout
        self._people = SafeConsole(is_stderr=is_json)
        self._errors = SafeConsole(is_stderr=True)

    @property
    def people(self) -> RichConsole:
        return self._people

    @contextlib.contextmanager
    def waiting(self, doing: str | Callable[[], str]) -> Iterator[None]:
        """Say on standard error what the command does meanwhile, if that takes longer than 3 s.

        Nothing where standard error has a log in JSON.

        Args:
            doing: Such as ``"loading the checkpoint"``; or a function that returns it, with how far
                it is: it is asked after 3 s, 6 s more, 12 s more and so on, and said if it changed.
        """
        is_over = threading.Event()

        def report() -> None:
            pause_s, said = _SILENCE_S, ""
            while not is_over.wait(pause_s):
                text = doing if isinstance(doing, str) else doing()
                if text != said:
                    self._errors.print(Text(f"{text} …", style="dim"), soft_wrap=True)
                pause_s, said = 2 * pause_s, text

        if self.has_json_log:
            yield
            return
        reporter = threading.Thread(target=report, name="rlmesh-ray-waiting", daemon=True)
        reporter.start()
        try:
            yield
        finally:
            is_over.set()
            reporter.join()  # so that it says nothing after what follows

    def event(self, kind: str, **fields: object) -> None:
        """Print an event for programs; nothing without ``--json``.

        Args:
            kind: Value of the key ``"event"``.
            fields: Values for JSON; NaN and infinities become null.
        """
        if self.is_json:
            line = json.dumps(finite({"event": kind, **fields}), default=str)
            self._programs.write(line + "\n")
            self._programs.flush()

    def say(self, text: str = "", *, style: str = "") -> None:
        """Print a line for people, never wrapped: they may copy it."""
        self._people.print(Text(printable(text), style=style), soft_wrap=True)

    def show(self, what: RenderableType) -> None:
        self._people.print(what)

    def facts(self, title: str, facts: Mapping[str, object], next_commands: Sequence[str]) -> None:
        """Print a panel of facts for people, and suggested commands.

        Args:
            title: Title of the panel.
            facts: Values by name; a value may have several lines.
            next_commands: Commands without the program's name.
        """
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in facts.items():
            table.add_row(name, Text(printable(str(value))))
        self.show(Panel(table, title=Text(title), title_align="left", expand=False))
        if next_commands:
            self.say("next:", style="dim")
            for command in next_commands:
                self.say(f"  {program()} {command}", style="cyan")

    def error(self, message: str, kind: str) -> None:
        """Print an error for people and as an event.

        Args:
            message: One line: the cause and the remedy.
            kind: Class of the error, for the event.
        """
        line = Text.assemble(("error: ", "bold red"), message)
        self._errors.print(line, soft_wrap=True)
        with contextlib.suppress(OSError):
            self.event("error", type=kind, message=message)

    def trace(self, text: str) -> None:
        """Print a traceback on standard error."""
        self._errors.print(Text(text), soft_wrap=True)


def program() -> str:
    if shutil.which("rlmesh-ray"):
        return "rlmesh-ray"
    script = Path(sys.executable).with_name("rlmesh-ray")
    if not script.exists():
        return f"{sys.executable} -m rlmesh_ray"
    is_below = script.is_relative_to(Path.cwd())
    return str(script.relative_to(Path.cwd()) if is_below else script)


def finite(value: object) -> object:
    """Return a value for JSON, which has neither NaN nor infinities: with None in their place."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value
