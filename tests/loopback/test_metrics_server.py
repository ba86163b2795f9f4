"""``/metrics`` over HTTP: what a scrape finds while endpoints serve, and how it ends."""

import contextlib
import gzip
import os
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlmesh_ray import EnvServer, MeasuredEndpoint, ModelServer, RemoteEnv, serve_metrics
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.main import main
from rlmesh_ray.cli.options.common import served_metrics
from rlmesh_ray.errors import ListenError
from rlmesh_ray.server.observe import metrics_server
from tests.loopback.eventually import eventually
from tests.loopback.test_cli import events, started

TIMEOUT_S = 60.0


def scraped(address: str) -> dict[tuple[str, str], float]:
    """The values at an address, by endpoint and name; those with a label of their own left out."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as answer:
        text = answer.read().decode()
    return {
        (sample.labels["endpoint_id"], sample.name): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if set(sample.labels) == {"endpoint_id", "fleet"}
    }


def metrics_of(server: EnvServer | ModelServer) -> contextlib.AbstractContextManager[str]:
    return serve_metrics("127.0.0.1:0", lambda: [MeasuredEndpoint("served", server.statistics())])


class Waits(gymnasium.Env[Any, Any]):
    """Its second step lasts until a file is there.

    Args:
        file: The file.
    """

    observation_space = gymnasium.spaces.Box(0, 10, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, file: str) -> None:
        self._file = Path(file)
        self._count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self._count += 1
        if self._count == 2:
            self._file.with_suffix(".entered").touch()
            assert eventually(self._file.exists)
        return np.zeros(1, np.float32), 1.0, False, False, {}


def test_a_scrape_is_answered_while_a_step_runs(tmp_path: Path) -> None:
    file = tmp_path / "go"
    with (
        EnvServer(Waits, env_kwargs={"file": str(file)}) as server,
        metrics_of(server) as metrics,
        RemoteEnv(server.address) as env,
    ):
        env.reset(seed=0)
        env.step(0)
        step = threading.Thread(target=env.step, args=(0,))
        step.start()
        assert eventually(file.with_suffix(".entered").exists)
        during = scraped(metrics)
        file.touch()
        step.join(TIMEOUT_S)
        after = scraped(metrics)

    steps = ("served", "rlmesh_ray_env_steps_total")
    assert (during[steps], after[steps]) == (1, 2)
    assert during["served", "rlmesh_ray_sessions"] == 1


def test_a_server_of_metrics_ends_and_leaves_the_endpoint() -> None:
    with ModelServer(lambda observations: observations) as server:
        with metrics_of(server) as metrics:
            assert scraped(metrics)["served", "rlmesh_ray_routes"] == 0
        with pytest.raises(urllib.error.URLError):
            scraped(metrics)

        assert server.health().is_serving


def test_an_address_in_use_names_the_remedy() -> None:
    with (
        serve_metrics("127.0.0.1:0", list) as metrics,
        pytest.raises(ListenError, match=r"in use.* another port"),
        serve_metrics(metrics, list),
    ):
        pass


HALF = b"GET /metrics HTTP/1.1\r\n"


def dialed(address: str, sent: bytes) -> socket.socket:
    host, _, port = address.partition(":")
    connection = socket.create_connection((host, int(port)), TIMEOUT_S)
    connection.sendall(sent)
    return connection


def everything(connection: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(2**16):
            received += data
    return received


def test_idle_connections_take_no_threads_and_few_descriptors() -> None:
    with serve_metrics("127.0.0.1:0", list) as metrics, contextlib.ExitStack() as stack:
        assert scraped(metrics) == {}
        before = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for _ in range(300):
            stack.enter_context(dialed(metrics, HALF))

        assert scraped(metrics) == {}
        after = before[1] + 300 + metrics_server.MAX_CONNECTIONS
        assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= after)
        assert eventually(lambda: threading.active_count() <= before[0])


@pytest.fixture
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_TIMEOUT_S", 0.1)


@pytest.mark.parametrize("sent", [b"", HALF, HALF + b"a: b\r\n"])
@pytest.mark.usefixtures("short_timeout")
def test_a_client_that_does_not_end_its_request_is_cut_off_in_time(sent: bytes) -> None:
    with serve_metrics("127.0.0.1:0", list) as metrics:
        with dialed(metrics, sent) as slow:
            assert everything(slow) == b""
        assert scraped(metrics) == {}


@pytest.mark.usefixtures("short_timeout")
def test_a_client_that_takes_no_answer_is_cut_off_in_time() -> None:
    with ModelServer(lambda observations: observations) as server:
        large = MeasuredEndpoint("x" * 2**17, server.statistics())
        with serve_metrics("127.0.0.1:0", lambda: [large]) as metrics:
            before = len(os.listdir("/proc/self/fd"))
            with dialed(metrics, HALF + b"\r\n") as client:
                assert client.recv(100).startswith(b"HTTP/1.1 200")
                assert eventually(lambda: len(os.listdir("/proc/self/fd")) == before + 1)


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (HALF + b"\r\n", b"HTTP/1.1 200 OK"),
        (b"GET /metrics?name[]=%ff HTTP/1.0\r\n\r\n", b"HTTP/1.1 200 OK"),
        (b"POST / HTTP/1.1\r\n\r\n", b"HTTP/1.1 "),
        (b"\xff\x00 : \r\n:\r\n\r\n", b"HTTP/1.1 "),
        (b"\r\n\r\n", b"HTTP/1.1 "),
        (HALF + b"a: " + b"b" * 2**20, b""),
    ],
)
def test_any_request_is_answered_or_cut_off(sent: bytes, answer: bytes) -> None:
    with serve_metrics("127.0.0.1:0", list) as metrics, dialed(metrics, b"") as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(sent)

        received = everything(client)
        assert received.startswith(answer)
        assert bool(received) == bool(answer)


def test_a_scrape_that_fails_is_answered_with_500(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> list[MeasuredEndpoint]:
        raise RuntimeError("no statistics")

    with serve_metrics("127.0.0.1:0", fail) as metrics, dialed(metrics, HALF + b"\r\n") as client:
        assert everything(client).startswith(b"HTTP/1.1 500 ")

    assert "no statistics" in caplog.text


def test_an_answer_is_compressed_where_that_is_asked_for() -> None:
    request = HALF + b"accept-encoding: gzip\r\n\r\n"
    with serve_metrics("127.0.0.1:0", list) as metrics, dialed(metrics, request) as client:
        head, _, body = everything(client).partition(b"\r\n\r\n")

    assert b"Content-Encoding: gzip" in head
    assert gzip.decompress(body) == b""


class Broken(gymnasium.Env[Any, Any]):
    """It cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("the simulator was started")


def test_an_address_in_use_is_named_before_the_environment_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    env = f"{__name__}:Broken"

    with serve_metrics("127.0.0.1:0", list) as taken:
        code = main(["serve-env", env, "--address", "127.0.0.1:0", "--metrics-address", taken])

    assert code == 1
    output = capsys.readouterr().err
    assert "cannot serve metrics" in output
    assert "simulator was started" not in output


def test_metrics_are_reported_after_what_they_are_about(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = Console(is_json=True)

    with served_metrics(console, "127.0.0.1:0", list) as announce:
        console.event("serving")
        announce()
        first, second = events(capsys.readouterr().out)
        found = scraped(second["address"])

    assert (first["event"], second["event"]) == ("serving", "metrics")
    assert found == {}


@pytest.mark.slow
def test_commands_that_serve_have_metrics(tmp_path: Path) -> None:
    (tmp_path / "own_policy.py").write_text("def make():\n    return lambda observations: [0]\n")
    options = ("--metrics-address", "127.0.0.1:0")
    named = ("--endpoint-id", "lab-1")
    with (
        started("serve-env", "CartPole-v1", *named, *options, folder=tmp_path) as (env, serving),
        started("serve-model", "own_policy:make", *options, folder=tmp_path) as (model, served),
    ):
        assert env.stdout is not None
        assert model.stdout is not None
        [of_env] = events(env.stdout.readline())
        [of_model] = events(model.stdout.readline())

        assert serving["event"] == served["event"] == "serving"
        assert scraped(of_env["address"])["lab-1", "rlmesh_ray_sessions"] == 0
        assert scraped(of_model["address"])[served["address"], "rlmesh_ray_routes"] == 0
