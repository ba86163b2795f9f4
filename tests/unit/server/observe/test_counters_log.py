import logging

import pytest

from rlmesh_ray.protocol.env_session import Failure, FailureKind
from rlmesh_ray.server.observe.counters import FailureLog, SessionCounters, SessionLog


@pytest.mark.parametrize(
    ("ends", "cause", "is_lost"),
    [
        ({"is_closed": True, "is_stopping": True}, "closed", False),
        ({"is_stopping": True}, "the endpoint stops", False),
        ({"is_idle": True}, "the client was silent", True),
        ({"has_failed": True}, "a fault of the endpoint", True),
        ({}, "the client left without Close", True),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_session_that_is_lost_is_a_warning_and_any_other_end_is_none(
    caplog: pytest.LogCaptureFixture, ends: dict[str, bool], cause: str, *, is_lost: bool
) -> None:
    caplog.set_level(logging.INFO, "rlmesh_ray.server")
    counts = SessionCounters()
    log = SessionLog(counts, "ipv4:127.0.0.1:1", "rlmesh.protocol.v1", lambda: {"steps": 3})

    log.end(**{"is_closed": False, "is_idle": False, "is_stopping": False, **ends})

    begin, end = caplog.records
    assert begin.levelno == logging.INFO
    assert end.levelno == (logging.WARNING if is_lost else logging.INFO)
    assert end.getMessage().endswith(f"and 3 steps: {cause}")
    assert counts.sessions().lost == is_lost


def raised(message: str, line: int) -> Failure:
    trace = (
        f'Traceback:\n  File "host.py", line 7, in step\n  File "mine.py", line {line}, in step\n'
    )
    return Failure(FailureKind.RAISED, message, trace)


def test_what_an_environment_raises_is_logged_with_its_traceback_once_and_then_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = FailureLog()

    for step in range(1, 101):
        log.note(raised(f"ValueError: boom, in lane 0, at step {step} of its episode", line=3))
    log.note(raised("ValueError: boom, in lane 0, at step 1 of its episode", line=4))

    texts = [record.getMessage() for record in caplog.records]
    assert [text.count("Traceback") for text in texts] == [1, 0, 0, 1]
    assert "raised an error: ValueError: boom, in lane 0, at step 1 of its episode" in texts[0]
    assert texts[1].endswith("at step 10 of its episode (the 10th time that this happens)")
    assert texts[2].endswith("at step 100 of its episode (the 100th time that this happens)")
    assert {record.levelno for record in caplog.records} == {logging.ERROR}


def test_failures_without_a_traceback_are_of_one_kind_if_they_differ_in_numbers_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = FailureLog()

    for timeout_ms in (900, 1800):
        log.note(Failure(FailureKind.TIMEOUT, f"no result within {timeout_ms} ms"))
    log.note(Failure(FailureKind.TIMEOUT, "still busy with an earlier request after 900 ms"))

    assert [record.getMessage() for record in caplog.records] == [
        "a request took too long: no result within 900 ms",
        "a request took too long: still busy with an earlier request after 900 ms",
    ]


def test_endlessly_many_kinds_of_failures_take_no_endless_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = FailureLog()

    for line in range(5000):
        log.note(raised("ValueError: boom", line))

    assert len(caplog.records) <= 1005, "a kind that is counted is logged once at least"
