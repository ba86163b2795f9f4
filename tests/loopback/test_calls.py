"""A step and a prediction call no more functions than they did: tests/call_limits.py."""

import pytest

from benchmarks.calls.measure import calls_of
from benchmarks.calls.plan import Subject
from tests.call_limits import LIMITS, above_the_limits


@pytest.mark.parametrize("subject", [Subject.STEP, Subject.PREDICTION])
def test_no_more_functions_are_called_than_before(subject: Subject) -> None:
    found = list(calls_of(subject))

    assert [each.case for each in found] == [case for case in LIMITS if f"{subject}, " in case]
    assert above_the_limits(found) == []
    assert all(each.client and each.files for each in found)  # something was counted
