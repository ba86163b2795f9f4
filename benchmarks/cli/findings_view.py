"""Output of the subjects of ``python -m benchmarks`` that find ratios."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from benchmarks.cli.progress_view import BenchView
from rlmesh_ray.cli.console import Console

if TYPE_CHECKING:
    from benchmarks.findings import Finding, Measurement


class FindingsReport:
    """Shows measurements as they are made.

    Args:
        console: Where.
        subject: The command.
        settings: For programs.
        caveats: What makes figures less than they seem, found in all of them.
    """

    def __init__(
        self,
        console: Console,
        subject: str,
        settings: Mapping[str, object],
        caveats: Callable[[Sequence["Finding"], Sequence["Measurement"]], list[str]],
    ) -> None:
        self._console = console
        self._subject = subject
        self._caveats = caveats
        self._view = BenchView(console, subject, settings)
        self._measurements: list[Measurement] = []
        self._findings: list[Finding] = []

    def note(self, measurement: "Measurement") -> None:
        """Take one measurement in, as soon as it is made."""
        self._measurements.append(measurement)
        self._console.event("measurement", subject=self._subject, **asdict(measurement))
        self._view.now(f"{measurement.workload}: {measurement.case}, {measurement.side}")

    def follow(
        self,
        workloads: Iterable[list["Finding"]],
        finish: Callable[[Sequence["Finding"]], Mapping[str, object]] = lambda _: {},
    ) -> int:
        """Show findings as they come, and the sum at the end; return the exit code.

        Args:
            workloads: The findings of each; measured while they are iterated over.
            finish: Makes something of all findings, if there are any; returns the fields
                to report to programs.
        """
        from benchmarks.report import cores

        is_complete = self._view.follow(lambda: self._take(workloads))
        if self._measurements:
            self._console.show(cores(self._measurements))
        made = finish(self._findings) if self._findings else {}
        return self._view.sum_up(
            is_complete=is_complete,
            caveats=self._caveats(self._findings, self._measurements),
            found={"findings": [finding.as_json() for finding in self._findings], **made},
        )

    def _take(self, workloads: Iterable[list["Finding"]]) -> None:
        from benchmarks.report import table

        for findings in workloads:
            self._findings += findings
            for finding in findings:
                self._console.event("finding", subject=self._subject, **finding.as_json())
            self._console.show(table(findings))
