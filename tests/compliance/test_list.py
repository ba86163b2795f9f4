"""The list of clauses in proto/README.md is complete and true."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlmesh_ray.compliance.checks import CLAUSES, Party
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
