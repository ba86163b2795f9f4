"""A step and a prediction call no more functions than they did: tests/call_limits.py."""

import json
from dataclasses import asdict

import pytest

from benchmarks.calls.plan import Calls, Subject
from benchmarks.cli.commands import app
from rlmesh_ray.cli.console import Console
from tests.call_limits import LIMITS, above_the_limits


@pytest.mark.parametrize("subject", [Subject.STEP, Subject.PREDICTION])
def test_no_more_functions_are_called_than_before(
    subject: Subject, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["calls", "--only", subject, "--json"]

    assert app(command, prog_name="bench", standalone_mode=False, obj=Console(is_json=True)) == 0

    *_, result = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [Calls(**each) for each in result["calls"]]
    assert [each.case for each in found] == [case for case in LIMITS if f"{subject}, " in case]
    assert above_the_limits(found) == []
    assert all(each.client and each.files for each in found)  # something was counted


def test_what_is_above_its_limit_is_named() -> None:
    limit = LIMITS["prediction, 1 row"]
    found = Calls(**{**asdict(limit), "client": limit.client + 1, "worker": 1, "files": 0})

    assert above_the_limits([limit, found]) == [
        f"prediction, 1 row: client {limit.client + 1} of {limit.client} at most",
        "prediction, 1 row: worker 1 of 0 at most",
    ]
