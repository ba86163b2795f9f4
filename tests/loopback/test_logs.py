"""What the serving commands write to standard error for programs."""

import json
import os
import signal
import subprocess
import sys
from typing import Any

from rlmesh_ray import RemoteEnv
from rlmesh_ray.server.log_format import FORMAT_VARIABLE

SERVE = [sys.executable, "-m", "rlmesh_ray", "serve-env", "CartPole-v1", "--json"]
TIMEOUT_S = 60.0


def log_of_a_session(*options: str, **variables: str) -> str:
    """Serve one session; return what has gone to standard error."""
    with subprocess.Popen(
        [*SERVE, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    ) as process:
        try:
            assert process.stdout is not None
            address = json.loads(process.stdout.readline())["address"]
            with RemoteEnv(address) as env:
                env.reset(seed=1)
                env.step(0)
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    return log


def check(log: str) -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in log.splitlines()]
    told = {line["event"]: line for line in lines if "event" in line}
    assert [*told] == ["serving", "session_begins", "session_ends", "stopped"]
    assert len({line["endpoint_id"] for line in told.values()}) == 1
    assert told["session_ends"]["steps"] == 1
    assert told["session_ends"]["session"] == told["session_begins"]["session"] != ""


def test_every_line_is_an_object_if_programs_ask_for_that() -> None:
    check(log_of_a_session("--log-format", "json"))


def test_the_environment_of_the_process_may_ask_for_it_too() -> None:
    check(log_of_a_session(**{FORMAT_VARIABLE: "json"}))


def test_sessions_that_go_well_are_not_told_to_people() -> None:
    log = log_of_a_session()

    assert "a session of" not in log
    assert "Ctrl-C" in log
