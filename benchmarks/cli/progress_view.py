"""Progress of a benchmark while it measures."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from rlmesh_ray.cli.console import Console

if TYPE_CHECKING:
    from rich.status import Status

INTERRUPTED = 130


class BenchView:
    """The machine first, then what happens now, and the result at the end.

    Args:
        console: Where.
        subject: The command.
        settings: For programs.
    """

    def __init__(self, console: Console, subject: str, settings: Mapping[str, object]) -> None:
        from benchmarks.machine import StealClock, describe

        self._console = console
        self._subject = subject
        self._settings = dict(settings)
        self._machine = describe()
        self._steal = StealClock()
        self._status: Status | None = None

    def now(self, text: str) -> None:
        """Show on a terminal what is being measured."""
        if self._status is not None:
            self._status.update(f"{text} …")

    def follow(self, measure: Callable[[], None]) -> bool:
        """Measure; return whether it came to its end.

        Args:
            measure: Shows what it finds. Ctrl-C ends it, not the benchmark: what was found so far
                is summed up.
        """
        from benchmarks.report import machine_facts

        self._console.event("machine", **asdict(self._machine))
        self._console.facts(f"benchmarks {self._subject}", machine_facts(self._machine), [])
        try:
            if self._console.people.is_terminal:
                with self._console.people.status("starting …") as self._status:
                    measure()
            else:
                measure()
        except KeyboardInterrupt:
            return False
        finally:
            self._status = None
        return True

    def sum_up(self, *, is_complete: bool, caveats: list[str], found: Mapping[str, object]) -> int:
        """Tell what it comes to; return the exit code.

        Args:
            is_complete: What ``follow`` returned.
            caveats: What makes the figures less than they seem.
            found: For programs, by name.
        """
        steal = self._steal.percent_of_a_core()
        self._console.say(
            f"steal time: {'not known' if steal is None else f'{steal:g} % of a core'}"
        )
        for caveat in caveats:
            self._console.say(f"! {caveat}", style="yellow")
        self._console.event(
            "result",
            subject=self._subject,
            is_complete=is_complete,
            machine=asdict(self._machine),
            steal_percent=steal,
            settings=self._settings,
            **found,
            caveats=caveats,
        )
        return 0 if is_complete else INTERRUPTED
