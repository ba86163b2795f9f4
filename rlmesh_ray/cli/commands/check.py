"""``rlmesh-ray check``: checks every clause of the edition against an endpoint."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text

import rlmesh_ray
from rlmesh_ray.cli.commands.evaluate import contract_of
from rlmesh_ray.cli.console import Console, program
from rlmesh_ray.cli.options.common import ConnectionFlags, flag
from rlmesh_ray.cli.signals import INTERRUPTED
from rlmesh_ray.compliance.checks import CLAUSES, SECTIONS, Finding, Verdict
from rlmesh_ray.dialects.registry import client_dialect
from rlmesh_ray.errors import (
    AccessDeniedError,
    CodecError,
    EndpointError,
    EndpointTimeoutError,
    EndpointUnreachableError,
    HandshakeRefusedError,
)

BROKEN = 3
"""Exit code when a clause is broken; 1 is for a check that could not be done."""

_CHECKS = "Checks"
_LANES_OF_A_MODEL = 2
_PROBE = "serve-env rlmesh_ray.testing.probe_env:RLMeshProbe-v0 --num-envs 2"


@dataclass(frozen=True)
class CheckFlags:
    """What is checked, and how."""

    env: str = flag(
        _CHECKS,
        "For a model only: a Gymnasium id or an endpoint that its policy fits.",
        "CartPole-v1",
        metavar="ENV_OR_ADDRESS",
    )
    validation: Literal["warn", "strict", "off"] = flag(
        _CHECKS, "For an environment only: how it treats values out of range.", "warn"
    )
    may_end_endpoint: bool = flag(
        _CHECKS, "Also send what may stop the endpoint: Shutdown, and Close to a model.", False
    )
    answer_timeout: float = flag(
        _CHECKS, "Longest wait for an answer.", 60.0, metavar="SECONDS", min=0.1
    )


@dataclass
class _Report:
    """Findings so far."""

    findings: list[Finding] = field(default_factory=list)
    planned: list[str] = field(default_factory=list)
    """Clauses to check."""
    could_act: bool = True
    """Whether a model's policy fits the named environment."""

    @property
    def unchecked(self) -> list[str]:
        return self.planned[len(self.findings) :]


def check(
    console: Console,
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="HOST:PORT, unix:PATH or rlmesh://HOST:PORT.")
    ],
    flags: CheckFlags,
    connection: ConnectionFlags,
) -> int:
    """Check an endpoint, in any language, against every clause of edition 2026.06.

    The command opens up to a hundred sessions, one after the other, and sends actions out of range
    and malformed ones: not for an environment that moves a real machine.

    Some clauses can only be observed when the endpoint serves the probe environment
    (rlmesh_ray.testing.probe_env:RLMeshProbe-v0).

    Exit codes: 0 no clause is broken, 3 some are, 1 the check could not be done, 2 wrong usage,
    130 interrupted.
    """
    _require_edition(address)
    connect_options = connection.to(address)
    report = _Report()
    is_interrupted = False
    try:
        for finding in _watched(console, report, _findings(connect_options, flags, report)):
            console.event(
                "finding",
                service=finding.service,
                clause=finding.clause,
                verdict=finding.verdict.value,
                message=finding.message,
            )
            report.findings.append(finding)
    except KeyboardInterrupt:
        is_interrupted = True  # the findings so far are shown
    _show(console, address, report)
    return INTERRUPTED if is_interrupted else _exit_code(report)


def _require_edition(address: str) -> None:
    """Refuse an address of another protocol.

    Raises:
        typer.BadParameter: ``address`` names one; the error names the alternative.
    """
    dialect = client_dialect(address)
    if dialect is None:
        return
    suite = dialect.compliance_suite
    own = f", and the dialect's own compliance tests ({suite}) check a server of it"
    remedy = (
        f"{program()} inspect {address} shows what is served there{own if suite else ''}; an "
        "endpoint of this package answers the edition on the same port: "
        f"{program()} check {address.rpartition('://')[2]}"
    )
    raise typer.BadParameter(f"check knows edition 2026.06 only; {remedy}", param_hint="ADDRESS")


def _exit_code(report: _Report) -> int:

    if any(finding.verdict is Verdict.BROKEN for finding in report.findings):
        return BROKEN
    return 0 if report.could_act else 1


def _findings(
    connect_options: "rlmesh_ray.ConnectOptions", flags: CheckFlags, report: _Report
) -> Iterator[Finding]:
    """Check the services of the endpoint; note in ``report`` what the findings do not say."""
    from rlmesh_ray.compliance.subjects import EnvSubject, ModelSubject
    from rlmesh_ray.compliance.suite import ENV_CHECKS, MODEL_CHECKS, check_all
    from rlmesh_ray.spaces.spec import TupleSpec
    from rlmesh_ray.spaces.validation import ValidationMode

    how: dict[str, Any] = {
        "may_ask_shutdown": flags.may_end_endpoint,
        "answer_timeout_s": flags.answer_timeout,
    }
    env = EnvSubject(connect_options, ValidationMode(flags.validation), **how)
    no_spaces = TupleSpec(())
    nothing = rlmesh_ray.EnvContract("", no_spaces, no_spaces, 0, rlmesh_ray.AutoresetMode.DISABLED)
    services = _services({"env": env, "model": ModelSubject(connect_options, nothing)})
    if "env" in services:
        report.planned += ENV_CHECKS
        yield from check_all(env)
    if "model" in services:
        report.planned += MODEL_CHECKS
        model = ModelSubject(connect_options, _contract(flags.env, connect_options), **how)
        for finding in check_all(model):
            report.could_act = not model.policy_problem
            yield finding


def _services(subjects: dict[str, Any]) -> list[str]:
    """Return which of the services the endpoint has.

    Raises:
        EndpointError: It has none of them, or refuses the token.
    """
    found = []
    failure: EndpointUnreachableError | None = None
    for service, subject in subjects.items():
        try:
            subject.shake_hands()
        except EndpointUnreachableError as error:
            failure = failure or error
            continue
        except (AccessDeniedError, EndpointTimeoutError):
            raise
        except (EndpointError, CodecError):
            pass  # the service exists and fails; the checks show how
        found.append(service)
    if failure is not None and not found:
        raise failure
    return found


def _contract(env: str, model: "rlmesh_ray.ConnectOptions") -> "rlmesh_ray.EnvContract":
    """Return the contract of an endpoint, or of an id that this serves for a moment.

    Args:
        env: An address, or a Gymnasium id.
        model: Connection options of the model, also used for an environment's endpoint.

    Raises:
        RlmeshError: The environment cannot be reached or made.
    """
    contract = contract_of(replace(model, address=env), num_envs=_LANES_OF_A_MODEL)
    if not isinstance(contract, rlmesh_ray.EnvContract) or contract.num_envs < 1:
        raise HandshakeRefusedError(
            f"{env}: the endpoint has no environment contract with at least one lane; it "
            "breaks the protocol, check it first"
        )
    return contract


def _watched(console: Console, report: _Report, findings: Iterator[Finding]) -> Iterator[Finding]:
    if not console.people.is_terminal:
        with console.waiting(
            lambda: f"checking: {len(report.findings)} of {len(report.planned)} clauses"
        ):
            yield from findings
        return
    with console.people.status("checking …") as status:
        for finding in findings:
            status.update(f"checking … {finding.clause}")
            yield finding


def _show(console: Console, address: str, report: _Report) -> None:
    """Show all clauses, why some could not be observed, which are broken, and the sum."""
    by_verdict: dict[Verdict, list[Finding]] = {verdict: [] for verdict in Verdict}
    for finding in report.findings:
        by_verdict[finding.verdict].append(finding)
    broken, unseen = by_verdict[Verdict.BROKEN], by_verdict[Verdict.NOT_OBSERVABLE]
    console.event(
        "result",
        address=address,
        holds=len(by_verdict[Verdict.HOLDS]),
        broken=[finding.clause for finding in broken],
        not_observable=len(unseen),
        unchecked=report.unchecked,
    )
    console.show(_clauses(report.findings))
    _show_unseen(console, unseen)
    _show_broken(console, broken)
    # Last: readers see the end first, right below the broken clauses.
    rest = f", {len(report.unchecked)} not reached" if report.unchecked else ""
    console.say()
    console.say(
        f"{address}: {len(by_verdict[Verdict.HOLDS])} clauses hold, {len(broken)} broken, "
        f"{len(unseen)} not observable here{rest}",
        style="red" if broken else "green" if report.could_act and not rest else "yellow",
    )


def _clauses(findings: list[Finding]) -> Table:
    """Return a table of the clauses, in the order of the edition's text."""
    marks = {
        Verdict.HOLDS: ("✓", "green"),
        Verdict.BROKEN: ("✗", "bold red"),
        Verdict.NOT_OBSERVABLE: ("-", "dim"),
    }
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for section, clauses in SECTIONS.items():
        shown = [
            (clause, finding)
            for clause in clauses
            for finding in findings
            if finding.clause == clause.key
        ]
        if shown:
            table.add_row("", Text(section, style="bold"))
        for clause, finding in shown:
            mark, style = marks[finding.verdict]
            is_dim = finding.verdict is Verdict.NOT_OBSERVABLE
            table.add_row(
                Text(mark, style=style),
                f"{finding.service}: {clause.key}",
                clause.says,
                style="dim" if is_dim else "",
            )
    return table


def _show_unseen(console: Console, unseen: list[Finding]) -> None:
    reasons = Counter(finding.message for finding in unseen)
    if not reasons:
        return
    table = Table(box=None, padding=(0, 2, 0, 2), show_header=False, style="dim")
    for reason, _ in reasons.most_common():
        clauses = ", ".join(one.clause for one in unseen if one.message == reason)
        table.add_row(Text(reason), Text(clauses))
    console.say()
    console.say("Not observable here:", style="bold")
    console.show(table)
    if any("probe" in reason for reason in reasons):
        console.say(
            "Clauses that need the probe can be checked on a server that hosts it; in Python:"
        )
        console.say(f"  {program()} {_PROBE}", style="cyan")


def _show_broken(console: Console, broken: list[Finding]) -> None:

    if broken:
        console.say()
        console.say("Broken:", style="bold red")
    for finding in broken:
        console.say(f"  ✗ {finding.service}: {finding.clause}", style="bold red")
        console.say(f"    {CLAUSES[finding.clause].says}")
        console.say(f"    seen: {finding.message}", style="red")
