import logging

import pytest

from rlmesh_ray.server.counts import SessionCounts
from rlmesh_ray.server.session_log import SessionLog


@pytest.mark.parametrize(
    ("ends", "cause", "is_lost"),
    [
        ({"is_closed": True, "is_stopping": True}, "closed", False),
        ({"is_stopping": True}, "the endpoint stops", False),
        ({"is_silent": True}, "its client was silent", True),
        ({"has_failed": True}, "a fault of the endpoint", True),
        ({}, "its client has gone without Close", True),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_session_that_is_lost_is_a_warning_and_any_other_end_is_none(
    caplog: pytest.LogCaptureFixture, ends: dict[str, bool], cause: str, *, is_lost: bool
) -> None:
    caplog.set_level(logging.INFO, "rlmesh_ray.server")
    counts = SessionCounts()
    log = SessionLog(counts, "ipv4:127.0.0.1:1", "rlmesh.protocol.v1", lambda: {"steps": 3})

    log.end(**{"is_closed": False, "is_silent": False, "is_stopping": False, **ends})

    begin, end = caplog.records
    assert begin.levelno == logging.INFO
    assert end.levelno == (logging.WARNING if is_lost else logging.INFO)
    assert end.getMessage().endswith(f"and 3 steps: {cause}")
    assert counts.sessions().lost == is_lost
