"""What the serving commands write to standard error for programs."""

import functools
import json
import logging
import os
import re
import signal
import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray import EnvServer, RemoteEnv, RemoteVectorEnv
from rlmesh_ray.errors import RemoteEnvError
from rlmesh_ray.protocol.client_session import endpoint_timeout_ms
from rlmesh_ray.testing.envs import Fault, FaultyEnv
from tests.loopback.client_internals import endpoints_give_up_after

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
    reported = {line["event"]: line for line in lines if "event" in line}
    assert [*reported] == ["serving", "session_begins", "session_ends", "stopped"]
    assert len({line["endpoint_id"] for line in reported.values()}) == 1
    assert reported["session_ends"]["steps"] == 1
    assert reported["session_ends"]["session"] == reported["session_begins"]["session"] != ""


def test_every_line_is_an_object_if_programs_ask_for_that() -> None:
    check(log_of_a_session("--log-format", "json"))


def test_people_see_clients_come_and_go() -> None:
    log = log_of_a_session()

    begin, end = (line for line in log.splitlines() if "client ipv4:127.0.0.1:" in line)
    assert "opened a session (rlmesh.protocol.v1)" in begin
    assert "and 1 steps: closed" in end
    assert "Ctrl-C" in log


class Breaks(gymnasium.Env[Any, Any]):
    """Raises in its third step, in its first, or returns a value of another shape."""

    observation_space = spaces.Discrete(9)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return 0, {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if action == 1:
            raise ValueError("out of fuel")
        return np.zeros(2) if action == 2 else 1, 1.0, False, False, {}


@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
def test_what_an_environment_does_wrong_is_in_the_log_with_lane_and_step(
    caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    caplog.set_level(logging.ERROR, "rlmesh_ray.server")
    with EnvServer(Breaks, num_envs=2) as server:
        env = RemoteVectorEnv(server.address, transport=transport)
        for last in ([0, 1], [0, 1], [2, 0]):
            env.reset()
            env.step(np.array([0, 0]))
            with pytest.raises(RemoteEnvError):
                env.step(np.array(last))
        env.close()

    first, second = (record.getMessage() for record in caplog.records)
    assert (
        "the environment raised an error: ValueError: out of fuel, in lane 1, at step 2 " in first
    )
    assert re.search(r'in step\n( +raise ValueError\("out of fuel"\)\n)?ValueError: out of', first)
    assert "a value that it must not: observation: " in second
    assert "lane 0" in second
    assert "at step 2 " in second


@pytest.mark.parametrize(
    ("transport", "num_envs", "lanes"),
    [("grpc", 1, "lane 0"), ("shared_memory", 2, "lanes 0 to 1, which step together")],
)
def test_a_step_that_takes_too_long_is_in_the_log_with_its_place_and_the_limit_that_was_set(
    caplog: pytest.LogCaptureFixture,
    transport: str,
    num_envs: int,
    lanes: str,
) -> None:
    caplog.set_level(logging.ERROR, "rlmesh_ray.server")
    hangs = functools.partial(FaultyEnv, Fault.HANG, at_step=2)
    with EnvServer(hangs, num_envs=num_envs, _step_grace_s=0.0) as server:
        env = RemoteVectorEnv(server.address, transport=transport)
        env.reset()
        env.action_space.seed(0)
        actions = env.action_space.sample()
        env.step(actions)
        # Only here: a busy machine may take long for the others.
        with (
            endpoints_give_up_after(endpoint_timeout_ms(0.8)),
            pytest.raises(RemoteEnvError, match=r"no result within 720 ms$"),
        ):
            env.step(actions)
        env.close()

    (text,) = (record.getMessage() for record in caplog.records)
    assert text == (
        f"a request took too long: no result within 720 ms, in {lanes}, after 1 vector steps of "
        "the session (a client of rlmesh-ray with a limit of 0.8 s leaves the endpoint that long)"
    )
