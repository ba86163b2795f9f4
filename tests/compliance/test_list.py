"""The list of clauses in proto/README.md is complete and true."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from rlmesh_ray.compliance.clauses import CLAUSES, Party
from rlmesh_ray.compliance.suite import ENV_CHECKS, MODEL_CHECKS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "proto" / "clauses.py"


def test_the_list_is_up_to_date() -> None:
    result = subprocess.run([sys.executable, SCRIPT, "--check"], cwd=ROOT, check=False)

    assert result.returncode == 0, "run python proto/clauses.py"


@pytest.mark.parametrize("clause", CLAUSES)
def test_every_clause_has_what_holds_it(clause: str) -> None:
    binds = CLAUSES[clause].binds

    assert (clause in ENV_CHECKS) == (binds in (Party.ENV_SERVER, Party.SERVERS))
    assert (clause in MODEL_CHECKS) == (binds in (Party.MODEL_SERVER, Party.SERVERS))
    if binds is Party.CLIENT:
        assert client_test(clause).split("[")[0] in functions("test_clients.py")


def test_every_client_test_that_is_listed_holds_a_clause() -> None:
    listed = [line for line in readme_lines() if "| clients |" in line]

    assert len(listed) == sum(clause.binds is Party.CLIENT for clause in CLAUSES.values())


def client_test(clause: str) -> str:
    """Return the name of the test that the list gives for a clause of clients."""
    (line,) = (line for line in readme_lines() if line.startswith(f"| `{clause}` |"))
    return line.split("|")[4].strip(" `")


def readme_lines() -> list[str]:
    return (SCRIPT.with_name("README.md")).read_text().splitlines()


def functions(file: str) -> set[str]:
    tree = ast.parse((Path(__file__).with_name(file)).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
