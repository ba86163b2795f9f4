"""Writes the list of clauses into proto/README.md, each with the test that holds it.

python proto/clauses.py          # writes
python proto/clauses.py --check  # fails when the list is out of date
"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the saboteurs are tests, not installed

from rlmesh_ray.compliance.checks import SECTIONS, Clause, Party
from rlmesh_ray.compliance.suite import ENV_CHECKS, MODEL_CHECKS
from tests.compliance import env_saboteurs, model_saboteurs, test_clients

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- clauses: begin -->\n", "<!-- clauses: end -->\n"

CLIENT_TESTS = {
    "session.handshake-first": (
        test_clients.test_our_client_establishes_its_session_as_the_edition_says
    ),
    "session.offer": test_clients.test_our_client_establishes_its_session_as_the_edition_says,
    "session.one-round": test_clients.test_our_client_does_not_try_again_after_a_refusal,
    "vector.nonzero": test_clients.test_our_client_takes_any_nonzero_byte_for_an_end,
    "errors.abandon": test_clients.test_our_client_gives_a_session_up_after_a_fatal_error,
    "model.demultiplex": test_clients.test_our_client_tells_responses_apart_by_their_ids,
}
"""What holds clients to a clause."""


def table() -> str:
    """Return the list as Markdown."""
    return "".join(_lines())


def _lines() -> Iterator[str]:
    for section, clauses in SECTIONS.items():
        yield f"\n**{section}**\n\n"
        yield "| clause | binds | what it says | held by | fails against |\n|---|---|---|---|---|\n"
        for clause in clauses:
            cells = [f"`{clause.key}`", clause.binds.value, clause.says, _test(clause)]
            yield f"| {' | '.join(cells)} | {_saboteur(clause)} |\n"
    yield "\n"


def _test(clause: Clause) -> str:
    if clause.binds is Party.CLIENT:
        return f"`{CLIENT_TESTS[clause.key].__name__}`"
    check = ENV_CHECKS.get(clause.key) or MODEL_CHECKS[clause.key]
    module = check.__module__.rpartition(".")[2]
    return f"`{module}.{check.__name__}`"


def _saboteur(clause: Clause) -> str:
    if clause.binds is Party.CLIENT:
        return "a client in the same test"
    tables = (env_saboteurs.SABOTEURS, model_saboteurs.SABOTEURS)
    names = dict.fromkeys(table[clause.key].__name__ for table in tables if clause.key in table)
    # A bar would end the cell.
    return ", ".join(f"`{name}`" for name in names).replace("|", "\\|")


def main() -> int:
    """Write the list, or with --check tell whether it is up to date."""
    text = README.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    wanted = f"{before}{BEGIN}{table()}{END}{after}"
    if "--check" in sys.argv:
        return int(wanted != text)
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
