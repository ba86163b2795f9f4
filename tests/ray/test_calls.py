"""A step of a runner calls no more functions than it did: tests/call_limits.py."""

import pytest

from benchmarks.calls.measure import runner_steps
from rlmesh_ray.polling import SPIN_VARIABLE
from tests.call_limits import LIMITS, above_the_limits


def test_no_more_functions_are_called_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SPIN_VARIABLE, "0")

    found = list(runner_steps())

    assert [each.case for each in found] == [case for case in LIMITS if "runner" in case]
    assert above_the_limits(found) == []
    assert all(each.client for each in found)  # something was counted
