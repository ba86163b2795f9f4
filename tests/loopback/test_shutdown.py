"""Stopping an endpoint from afar: only where the operator said so, and with every answer given."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray import EnvServer, ModelServer, RemoteEnv, RemoteModel
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import EnvClient
from rlmesh_ray.client.model.remote_model import contract_of
from rlmesh_ray.errors import EndpointError
from rlmesh_ray.wire.rlmesh_v1 import env as wire
from rlmesh_ray.wire.rlmesh_v1.handshake import ShutdownResponse
from tests.loopback.client_internals import vanish
from tests.loopback.ports import plain_channel

ENV = "/rlmesh.env.v1.EnvService/Shutdown"
MODEL = "/rlmesh.model.v1.ModelService/Shutdown"


def shut_down(address: str, path: str) -> ShutdownResponse:
    with plain_channel(address) as channel:
        return wire.HANDSHAKE.parse_shutdown_response(
            channel.unary_unary(path)(
                wire.HANDSHAKE.pack_shutdown_request("the day is over"), timeout=20.0
            )
        )


class Slow(gymnasium.Env[Any, Any]):
    """Steps when its gate has been opened; shows that it waits in a second pipe."""

    observation_space = spaces.Discrete(9)
    action_space = spaces.Discrete(2)

    def __init__(self, gate: str, bell: str) -> None:
        self._gate, self._bell = gate, bell

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return 0, {}

    def step(self, action: Any) -> Any:
        Path(self._bell).write_text("")
        Path(self._gate).read_text()
        return 1, 1.0, False, False, {}


@pytest.fixture
def pipes(tmp_path: Path) -> tuple[Path, Path]:
    gate, bell = tmp_path / "gate", tmp_path / "bell"
    os.mkfifo(gate)
    os.mkfifo(bell)
    return gate, bell


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


class SlowPolicy:
    """Acts when it may; shows that it has been asked."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()
        self.may_act = threading.Event()

    def __call__(self, observations: Any) -> Any:
        self.is_asked.set()
        self.may_act.wait(20.0)
        return np.zeros(len(observations), np.int64)


CARTPOLE = contract_of(gymnasium.make("CartPole-v1"))
OBSERVATION = np.zeros((1, 4), np.float32)


def test_an_env_endpoint_refuses_to_be_shut_down_and_serves_on() -> None:
    with EnvServer("CartPole-v1") as server:
        env = RemoteEnv(server.address)
        env.reset()

        response = shut_down(server.address, ENV)

        assert not response.accepted
        assert "--allow-shutdown" in response.message
        env.step(0)
        env.close()
        assert not server.wait(0.0)


def test_a_model_endpoint_refuses_to_be_shut_down_and_serves_on() -> None:
    with (
        ModelServer(lambda batch: np.zeros(len(batch), np.int64)) as server,
        RemoteModel(server.address) as model,
    ):
        model.configure_route(CARTPOLE)

        response = shut_down(server.address, MODEL)

        assert not response.accepted
        assert "--allow-shutdown" in response.message
        model.predict(OBSERVATION)


@pytest.mark.parametrize("path", [ENV, MODEL])
def test_a_shutdown_that_does_not_decode_stops_nothing(path: str) -> None:
    server: EnvServer | ModelServer
    if path == ENV:
        server = EnvServer("CartPole-v1", allow_shutdown=True)
    else:
        server = ModelServer(lambda batch: batch, allow_shutdown=True)
    with server, plain_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(path)(b"\xff\xff", timeout=20.0)

        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not server.wait(0.0)


def test_requests_that_a_stopping_endpoint_does_not_take_are_answered(
    pipes: tuple[Path, Path],
) -> None:
    gate, bell = pipes
    server = EnvServer(lambda: Slow(str(gate), str(bell)), allow_shutdown=True).start()
    client = EnvClient(ConnectOptions(server.address))
    client.reset()
    first, second = (client.send_step([np.zeros(1, np.int64)], is_last=False) for _ in range(2))
    bell.read_text()

    shut_down(server.address, ENV)
    assert not server.wait(0.3)
    gate.write_text("")

    client.receive_step(first)
    with pytest.raises(EndpointError, match="the endpoint is stopping"):
        client.receive_step(second)
    assert server.wait(20.0)
    client.close()


def test_an_accepted_shutdown_answers_the_step_that_is_outstanding_and_stops(
    pipes: tuple[Path, Path],
) -> None:
    gate, bell = pipes
    server = EnvServer(lambda: Slow(str(gate), str(bell)), allow_shutdown=True).start()
    busy, idle = (
        EnvClient(ConnectOptions(server.address)),
        EnvClient(ConnectOptions(server.address)),
    )
    busy.reset()
    idle.reset()
    request_id = busy.send_step([np.zeros(1, np.int64)])
    bell.read_text()

    response = shut_down(server.address, ENV)
    stops_before_the_answer = server.wait(0.3)
    gate.write_text("")

    assert response.accepted
    assert not stops_before_the_answer
    assert busy.receive_step(request_id).rewards.tolist() == [1.0]
    assert server.wait(20.0)
    for client in (busy, idle):
        with pytest.raises(EndpointError):
            client.reset()
        client.close()
    with pytest.raises(EndpointError):
        RemoteEnv(server.address)
    server.stop()


def test_an_accepted_shutdown_answers_the_predict_that_is_outstanding_and_stops(
    aside: ThreadPoolExecutor,
) -> None:
    policy = SlowPolicy()
    server = ModelServer(policy, allow_shutdown=True).start()
    model = RemoteModel(server.address)
    model.configure_route(CARTPOLE)
    actions = aside.submit(model.predict, OBSERVATION)
    assert policy.is_asked.wait(20.0)

    response = shut_down(server.address, MODEL)
    stops_before_the_answer = server.wait(0.3)
    policy.may_act.set()

    assert response.accepted
    assert not stops_before_the_answer
    assert actions.result(20.0).tolist() == [0]
    assert server.wait(20.0)
    model.close()


def test_a_close_stops_the_participant_where_the_operator_said_so(
    aside: ThreadPoolExecutor,
) -> None:
    policy = SlowPolicy()
    server = ModelServer(policy, stop_on_close=True).start()
    leaving, busy = RemoteModel(server.address), RemoteModel(server.address)
    busy.configure_route(CARTPOLE)
    actions = aside.submit(busy.predict, OBSERVATION)
    assert policy.is_asked.wait(20.0)

    leaving.close()
    stops_before_the_answer = server.wait(0.3)
    policy.may_act.set()

    assert not stops_before_the_answer
    assert actions.result(20.0).tolist() == [0]
    assert server.wait(20.0)
    busy.close()


def test_a_client_that_vanishes_is_no_close() -> None:
    with ModelServer(lambda batch: batch, stop_on_close=True) as server:
        model = RemoteModel(server.address)
        vanish(model)

        assert not server.wait(0.3)
        vanish(RemoteModel(server.address))


def test_stopping_an_endpoint_whose_clients_are_idle_takes_no_grace() -> None:
    with EnvServer("CartPole-v1") as server:
        env = RemoteEnv(server.address)
        env.reset()
        stopping = threading.Thread(target=server.stop, kwargs={"grace_s": 1000.0})

        stopping.start()

        assert server.wait(20.0)
        stopping.join(20.0)
        env.close()


@pytest.mark.parametrize(
    ("command", "path"),
    [
        pytest.param(["serve-env", "CartPole-v1"], ENV, marks=pytest.mark.nightly),
        (["serve-model", "policy:act"], MODEL),
    ],
)
def test_a_command_that_was_shut_down_from_afar_ends_well(
    tmp_path: Path, command: list[str], path: str
) -> None:
    (tmp_path / "policy.py").write_text("def act():\n    return lambda batch: batch\n")
    arguments = [*command, "--allow-shutdown", "--accept-edition-text", "rlmesh-0.1.0b3", "--json"]
    with subprocess.Popen(
        [sys.executable, "-m", "rlmesh_ray", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), str(tmp_path)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]

        response = shut_down(address, path)
        output, errors = process.communicate(timeout=30)

    assert response.accepted
    assert process.returncode == 0
    assert json.loads(output)["event"] == "stopped"
    assert "Traceback" not in errors
