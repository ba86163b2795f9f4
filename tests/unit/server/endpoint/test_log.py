import json
import logging
from collections.abc import Iterator

import pytest

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.server.endpoint.log import (
    FORMAT_VARIABLE,
    LogFormat,
    configure_logging_from_environment,
    enter,
    facts,
    formatter_of,
    log_to_stderr,
    logged_as,
    short_name,
)

PACKAGE = logging.getLogger("rlmesh_ray")
LOG = logging.getLogger("rlmesh_ray.server.anything")


class Stderr:
    """What has been written there since it was read last."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def lines(self) -> list[str]:
        return self._capsys.readouterr().err.splitlines()


@pytest.fixture(autouse=True)
def stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Stderr]:
    monkeypatch.setattr(logging.getLogger(PACKAGE.name), "handlers", [])
    former = PACKAGE.level
    yield Stderr(capsys)
    PACKAGE.setLevel(former)
    enter("", "")


def test_json_is_one_object_a_line_with_the_names_of_endpoint_and_session(
    stderr: Stderr,
) -> None:
    log_to_stderr(LogFormat.JSON)
    enter("hills/0", "12ab34cd")
    LOG.info("a session\nbegins", extra=facts("session_begins", peer="ipv4:127.0.0.1:9"))

    (line,) = stderr.lines()
    logged = json.loads(line)
    assert logged["time"].endswith("+00:00")
    del logged["time"]
    assert logged == {
        "level": "INFO",
        "logger": "rlmesh_ray.server.anything",
        "message": "a session\nbegins",
        "endpoint_id": "hills/0",
        "session": "12ab34cd",
        "event": "session_begins",
        "peer": "ipv4:127.0.0.1:9",
    }


def test_json_has_the_traceback_of_an_error(stderr: Stderr) -> None:
    log_to_stderr(LogFormat.JSON)
    try:
        raise ValueError("no such thing")
    except ValueError:
        LOG.exception("it failed")

    logged = json.loads(*stderr.lines())
    assert "ValueError: no such thing" in logged["error"]
    assert (logged["level"], logged["session"]) == ("ERROR", "")


def test_text_names_endpoint_and_session_behind_the_message(stderr: Stderr) -> None:
    log_to_stderr(LogFormat.TEXT)
    enter("hills/0", "12ab34cd")
    LOG.warning("the worker is killed")
    with logged_as("hills/1"):
        enter("hills/1", "")
        LOG.warning("it stops")
    enter("", "")
    LOG.warning("nothing special")

    first, second, third = stderr.lines()
    assert first.endswith(": the worker is killed [endpoint hills/0 session 12ab34cd]")
    assert second.endswith(": it stops [endpoint hills/1]")
    assert third.endswith(": nothing special")


def test_people_see_warnings_only_and_programs_sessions_too(stderr: Stderr) -> None:
    log_to_stderr(LogFormat.TEXT)
    LOG.info("a session begins")
    assert not stderr.lines()

    log_to_stderr(LogFormat.JSON)
    LOG.info("a session begins")
    assert len(stderr.lines()) == 1


def test_people_see_sessions_and_the_end_where_they_are_wanted_and_nothing_else_below_warnings(
    stderr: Stderr,
) -> None:
    log_to_stderr(LogFormat.TEXT, with_sessions=True)

    LOG.info("it drains", extra=facts("draining"))
    LOG.info("a client comes", extra=facts("session_begins"))
    LOG.warning("a client is lost")
    LOG.info("it stops", extra=facts("stopped"))

    assert [line.partition(": ")[2] for line in stderr.lines()] == [
        "a client comes",
        "a client is lost",
        "it stops",
    ]


def test_the_last_call_counts_and_other_handlers_stay(stderr: Stderr) -> None:
    other = logging.NullHandler()
    PACKAGE.addHandler(other)
    log_to_stderr(LogFormat.TEXT)
    log_to_stderr(LogFormat.JSON)

    LOG.warning("once")

    assert len(stderr.lines()) == 1
    assert other in PACKAGE.handlers


def test_an_actor_logs_in_the_format_of_its_environment_variable(
    monkeypatch: pytest.MonkeyPatch, stderr: Stderr
) -> None:
    monkeypatch.delenv(FORMAT_VARIABLE, raising=False)
    configure_logging_from_environment()
    assert not PACKAGE.handlers

    monkeypatch.setenv(FORMAT_VARIABLE, "json")
    configure_logging_from_environment()
    LOG.info("a session begins")
    assert json.loads(*stderr.lines())["message"] == "a session begins"

    monkeypatch.setenv(FORMAT_VARIABLE, "yaml")
    with pytest.raises(ConfigurationError, match="RLMESH_RAY_LOG_FORMAT='yaml'"):
        configure_logging_from_environment()


def test_records_outside_of_all_endpoints_are_formatted_all_the_same() -> None:
    record = logging.LogRecord("rlmesh_ray.x", logging.INFO, "", 1, "%d done", (3,), None)

    assert json.loads(formatter_of(LogFormat.JSON).format(record))["message"] == "3 done"
    assert formatter_of(LogFormat.TEXT).format(record).endswith("rlmesh_ray.x: 3 done")


def test_a_session_s_name_in_the_log_is_always_the_same_and_not_part_of_its_id() -> None:
    session_id = "0123456789abcdef0123456789abcdef"

    assert short_name(session_id) == short_name(session_id)
    assert len(short_name(session_id)) == 8
    assert short_name(session_id) not in session_id
    assert short_name("") != short_name("")


def test_text_of_a_peer_controls_no_terminal_and_forges_no_record(stderr: Stderr) -> None:
    log_to_stderr(LogFormat.TEXT)
    try:
        raise ValueError("cause \x9b2J")
    except ValueError:
        LOG.exception("a client said \x1b]0;title\x07 \n2026-01-01 00:00:00,000 ERROR forged")

    lines = stderr.lines()
    assert not {"\x1b", "\x07", "\x9b"} & set("".join(lines))
    assert "a client said \\x1b]0;title\\x07" in lines[0]
    assert lines[-1] == "  ValueError: cause \\x9b2J"
    assert all(line.startswith("  ") for line in lines[1:])
