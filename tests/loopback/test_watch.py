"""The live page over real endpoints: what it shows is what they do, and it changes nothing."""

import contextlib
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from PIL import Image

from rlmesh_ray import EnvServer, ModelServer, RemoteModel, RemoteVectorEnv
from rlmesh_ray.auth.token_file import endpoint_token
from rlmesh_ray.cli.main import main
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.endpoint_registration import RegistrarOptions, Registration
from rlmesh_ray.client.env.observer import EndpointObserver
from rlmesh_ray.errors import CapacityError
from rlmesh_ray.server.pool.pool_admission import Registrar
from rlmesh_ray.testing.envs import EchoEnv
from rlmesh_ray.testing.equality import assert_identical
from rlmesh_ray.watch.live import AddressSource, LiveView, WatchedAddress
from rlmesh_ray.watch.page import page
from rlmesh_ray.watch.runs import RunFolder
from tests.loopback.eventually import eventually
from tests.loopback.test_observers import Drawn, begun
from tests.loopback.test_registration import SECRET, Book
from tests.unit.recording.recordings import INFO, cart_pole, cart_poles, written
from tests.watched import Reply, fetch

NUM_LANES = 3
NUM_PICTURES = 12
SEED = 7
ACTION_SPACE: Any = spaces.Discrete(5)


def echo() -> EchoEnv:
    return EchoEnv(spaces.Box(-1, 1, (3,), np.float32), ACTION_SPACE, render_mode="rgb_array")


class Page:
    """A page of endpoints at addresses, asked once a minute.

    Args:
        targets: The addresses.
    """

    def __init__(self, *targets: WatchedAddress) -> None:
        self._now_s = 0.0
        live = LiveView(AddressSource(targets), lambda: self._now_s)
        self._app = page(live, RunFolder(Path("none")))

    def endpoints(self) -> list[dict[str, Any]]:
        """Return the endpoints."""
        return list(self._ask("endpoints").json["endpoints"])

    def endpoint(self) -> dict[str, Any]:
        """Return the only endpoint."""
        (endpoint,) = self.endpoints()
        return endpoint

    def sessions(self) -> dict[str, Any]:
        """Return the sessions of the only endpoint, and why they are not known."""
        return dict(self._ask("sessions", endpoint=self.endpoint()["key"]).json)

    def session(self) -> dict[str, Any]:
        """Return the only session of the only endpoint."""
        (session,) = self.sessions()["sessions"]
        return dict(session)

    def picture(self, lane: int) -> Reply:
        """Return the picture of a lane of the only session."""
        key, name = self.endpoint()["key"], self.session()["name"]
        return self._ask("picture", endpoint=key, session=name, lane=lane)

    def _ask(self, path: str, **values: object) -> Reply:
        self._now_s += 60.0
        return fetch(self._app, f"/api/{path}?{urllib.parse.urlencode(values)}")


def watching(address: str, token: str | None = None) -> Page:
    """Return a page of one endpoint."""
    return Page(WatchedAddress(ConnectOptions(address, token)))


# Observers see both ways in test_observers.
@pytest.mark.parametrize(
    "transport", [pytest.param("grpc", marks=pytest.mark.nightly), "shared_memory"]
)
def test_trajectories_are_what_they_are_without_the_page(transport: str) -> None:
    local = SyncVectorEnv([echo] * NUM_LANES)
    local.action_space.seed(SEED)
    is_over = threading.Event()
    pictures: list[bytes] = []

    def look(page: Page) -> None:
        while not is_over.is_set():
            reply = page.picture(len(pictures) % NUM_LANES)
            pictures.extend([reply.body] * (reply.status == 200))

    with EnvServer(echo, num_envs=NUM_LANES) as server, ThreadPoolExecutor(1) as threads:
        remote = RemoteVectorEnv(server.address, transport=transport)
        assert_identical(remote.reset(seed=SEED), local.reset(seed=SEED))
        looking = threads.submit(look, watching(server.address))
        try:
            while len(pictures) < NUM_PICTURES and not looking.done():
                actions = local.action_space.sample()
                assert_identical(remote.step(actions), local.step(actions))
        finally:
            is_over.set()
        looking.result()
        remote.close()
    local.close()
    assert Image.open(io.BytesIO(pictures[0])).format == "PNG"


def test_an_environment_is_shown_with_what_it_has_done() -> None:
    with EnvServer(echo, num_envs=2) as server:
        app = watching(server.address)
        before = app.endpoint()
        envs = RemoteVectorEnv(server.address)
        envs.reset(seed=1)
        for _ in range(5):
            envs.step(np.zeros(2, np.int64))
        now = app.endpoint()
        session = app.session()
        envs.close()

    assert (before["service"], before["state"], before["lane_steps"]) == ("env", "live", 0)
    assert (now["sessions"], now["steps"], now["lane_steps"]) == (1, 5, 10)
    assert now["step_p50_s"] > 0
    assert session["num_steps"] == 5
    assert session["num_lane_steps"] == 10
    assert len(session["step_counts"]) == 2
    assert now["endpoint_id"] == now["address"] == server.address


def test_a_policy_is_shown_with_its_version_batches_and_times() -> None:
    class Still:
        def __call__(self, observations: Any) -> Any:
            return np.zeros(len(observations), np.int64)

    with ModelServer(Still()) as server:
        app = watching(server.address)
        with RemoteModel(server.address) as model:
            model.configure_route(gymnasium.make_vec("CartPole-v1", num_envs=4))
            for _ in range(3):
                model.predict(np.zeros((4, 4), np.float32))
            now = app.endpoint()

    assert (now["service"], now["policy_version"], now["routes"]) == ("model", 0, 1)
    assert (now["predictions"], now["rows_per_batch"]) == (3, 4)
    assert now["forward_p50_s"] > 0
    assert now["queue_p99_s"] is not None


def test_an_endpoint_that_goes_is_stale_and_one_that_comes_back_has_restarted() -> None:
    with EnvServer(echo) as server:
        address = server.address
        app = watching(address)
        assert app.endpoint()["state"] == "live"
        with contextlib.closing(_reset(server)):
            before = app.sessions()
    gone, after = app.endpoint(), app.sessions()
    with EnvServer(echo, address=address):
        # gRPC waits a moment before it dials again.
        assert eventually(lambda: app.endpoint()["state"] == "live")
        again = app.endpoint()

    assert before["sessions"]
    assert after["sessions"] == []
    assert "nothing answers there" in after["problem"]
    assert gone["state"] == "stale"
    assert "nothing answers there" in gone["problem"]
    assert gone["version"]
    assert (again["restarts"], again["problem"]) == (1, "")


def test_an_endpoint_says_why_it_cannot_be_watched() -> None:
    with EnvServer(echo, token="a token", observers=False) as server:
        strange = watching(server.address).endpoint()
        refused = watching(server.address, token="a token").endpoint()

    assert "requires a token" in strange["problem"]
    assert "--no-observers" in refused["problem"]


def test_a_lane_without_pictures_says_how_to_get_some() -> None:
    with EnvServer("CartPole-v1") as server, contextlib.closing(_reset(server)):
        app = watching(server.address)
        reply = app.picture(0)

    assert reply.status == 409
    assert b"render_mode='rgb_array'" in reply.body
    assert float(reply.headers["x-wait-s"]) >= 0


def _reset(server: EnvServer) -> RemoteVectorEnv:
    envs = RemoteVectorEnv(server.address)
    envs.reset(seed=1)
    return envs


def test_a_pools_address_lists_its_members_and_their_lanes() -> None:
    token = endpoint_token(SECRET, "games", "sim-1")
    with (
        Registrar("games", Book(), secret=SECRET) as registrar,
        EnvServer(echo, num_envs=2, token=token) as server,
    ):
        options = RegistrarOptions(registrar.address, "games", "sim-1", SECRET, None)
        app = Page(WatchedAddress(ConnectOptions(registrar.address), "games", SECRET))
        port = int(server.address.rpartition(":")[2])
        with Registration(options, host="127.0.0.1", port=port):
            assert eventually(app.endpoints)
            envs = RemoteVectorEnv(server.address, token=token)
            envs.reset(seed=1)
            member, drawn = app.endpoint(), app.picture(1)
            envs.close()

    assert (member["fleet"], member["endpoint_id"]) == ("pool/games", "sim-1")
    assert (member["address"], member["state"]) == (server.address, "live")
    assert drawn.status == 200


@pytest.fixture(name="command")
def _command(tmp_path: Path) -> list[str]:
    token = tmp_path / "page-token"
    token.write_text("page-token-of-a-test\n")
    token.chmod(0o600)
    return [sys.executable, "-m", "rlmesh_ray", "watch", "--json", "--address", "127.0.0.1:0"]


def test_the_command_serves_the_page_until_it_is_stopped(
    command: list[str], tmp_path: Path
) -> None:
    with ModelServer(len) as server:
        options = [server.address, "--page-token-file", str(tmp_path / "page-token")]
        process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            started = json.loads(process.stdout.readline())
            request = urllib.request.Request(f"{started['url']}/api/endpoints")
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(request, timeout=20.0)
            request.add_header("Authorization", "Bearer page-token-of-a-test")
            with urllib.request.urlopen(request, timeout=20.0) as reply:
                (endpoint,) = json.load(reply)["endpoints"]
        finally:
            process.terminate()
            assert process.wait(30.0) == 0
            process.stdout.close()

    assert started["event"] == "watching"
    assert endpoint["address"] == server.address


def test_ctrl_c_ends_it_quietly_while_a_request_waits(command: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as threads:
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen(
            [*command, target], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            waiting = threads.submit(urllib.request.urlopen, f"{url}/api/endpoints", None, 20.0)
            connection, _ = silent.accept()
            with connection:  # which nothing answers
                process.send_signal(signal.SIGINT)
                _, text = process.communicate(timeout=30.0)
            assert isinstance(waiting.exception(20.0), urllib.error.URLError)
        finally:
            process.kill()

    assert process.returncode == 0
    assert text.endswith("╯\n")  # of what it has said at its start


class Site:
    """A page that a process of its own serves.

    Args:
        process: The process.
    """

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        self._address = urllib.parse.urlsplit(url).netloc
        self._process = psutil.Process(process.pid)

    def ask(self, path: str, **values: object) -> Reply:
        """Return the answer to a request."""
        target = f"http://{self._address}/api/{path}?{urllib.parse.urlencode(values)}"
        try:
            reply: Any = urllib.request.urlopen(target, timeout=60.0)
        except urllib.error.HTTPError as error:
            reply = error
        with reply:
            return Reply(reply.status, dict(reply.headers), reply.read())

    def begin(self, path: str, **values: object) -> socket.socket:
        """Return the connection of a browser that has sent a request."""
        host, _, port = self._address.partition(":")
        browser = socket.create_connection((host, int(port)), 60.0)
        line = f"GET /api/{path}?{urllib.parse.urlencode(values)} HTTP/1.1"
        browser.sendall(f"{line}\r\nHost: {self._address}\r\n\r\n".encode())
        return browser

    def has_open(self, path: Path) -> bool:
        """Return whether the process has a file open."""
        return str(path) in {each.path for each in self._process.open_files()}


@contextlib.contextmanager
def site(command: list[str], *arguments: str) -> Iterator[Site]:
    """Serve a page, whose process says nothing more than at its start."""
    process = subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield Site(process)
    finally:
        process.terminate()
        _, text = process.communicate(timeout=60.0)
    assert process.returncode == 0
    assert text.endswith("╯\n")


PNG = b"\x89PNG"


def test_runs_and_recordings_are_shown_from_where_a_browser_asks(tmp_path: Path) -> None:
    for number, name in enumerate(("old", "new")):
        (tmp_path / name).mkdir()
        progress = tmp_path / name / "progress.csv"
        progress.write_text("iteration\n" + "".join(f"{each}\n" for each in range(901)))
        os.utime(progress, (number, number))
    cart_poles(tmp_path / "recorded", 53)  # of 3 to 55 steps
    app = page(LiveView(AddressSource([])), RunFolder(tmp_path))

    def ask(path: str, **values: object) -> Any:
        return fetch(app, f"/api/{path}?{urllib.parse.urlencode(values)}").json

    overview = ask("runs")
    assert [run["name"] for run in overview["runs"]] == ["new", "old"]
    assert overview["recordings"] == ["recorded"]
    curve = [row["iteration"] for row in ask("curve", run="new")]
    assert (len(curve), curve[-1]) == (301, 900)
    first = ask("episodes", recording="recorded", order="longest", first=0)
    rest = ask("episodes", recording="recorded", order="longest", first=50)
    assert first["total"] == rest["total"] == 53
    lengths = [each["length"] for part in (first, rest) for each in part["episodes"]]
    assert lengths == list(range(55, 2, -1))
    shortest = rest["episodes"][-1]["id"]
    assert ask("episode", recording="recorded", episode=shortest)["returns"] == [
        {"x": step, "y": float(step)} for step in (1, 2, 3)
    ]


def test_a_browser_that_goes_while_a_picture_is_drawn_leaves_it_to_the_others(
    command: list[str], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"

    def is_drawn_for(observer: EndpointObserver) -> bool:
        with contextlib.suppress(CapacityError):  # after a long picture there is a pause
            return observer.render(of["session"]).startswith(PNG)
        return False

    with (
        EnvServer(lambda: Drawn(str(gate))) as server,
        contextlib.closing(_reset(server)) as envs,
        site(command, server.address) as shown,
    ):
        of = {"endpoint": shown.ask("endpoints").json["endpoints"][0]["key"]}
        of["session"] = shown.ask("sessions", **of).json["sessions"][0]["name"]
        with shown.begin("picture", **of):
            assert eventually(begun(gate).exists)

        assert shown.ask("endpoints").status == 200
        assert shown.ask("picture", **of).status != 200  # one at a time
        gate.touch()
        assert eventually(lambda: shown.ask("picture", **of).body.startswith(PNG))
        envs.step(np.zeros(1, np.int64))
        with EndpointObserver(server.address) as observer:
            assert eventually(lambda: is_drawn_for(observer))


def test_a_browser_that_goes_in_the_midst_of_a_video_leaves_it_to_the_others(
    command: list[str], tmp_path: Path
) -> None:
    frames = np.zeros((4, 16, 16, 3), np.uint8)
    written(tmp_path / "recorded", INFO, replace(cart_pole(3, seed=0), frames=frames))
    video = tmp_path / "recorded" / "episodes" / "000001.mp4"
    whole = video.read_bytes()
    os.truncate(video, 2**26)  # more than sockets hold
    of = {"recording": "recorded", "episode": "000001"}
    with site(command, "127.0.0.1:1", "--folder", str(tmp_path)) as shown:
        assert shown.ask("runs").json["recordings"] == ["recorded"]
        with shown.begin("video", **of) as browser:
            assert browser.recv(64).startswith(b"HTTP/1.1 200")
            assert eventually(lambda: shown.has_open(video))
            assert shown.ask("episode", **of).json["length"] == 3

        assert eventually(lambda: not shown.has_open(video))
        os.truncate(video, len(whole))
        assert shown.ask("video", **of).body == whole


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["127.0.0.1:1", "--address", "0.0.0.0:7080"], "--page-token-file"),
        (["127.0.0.1:1", "--address", "unix:page"], "browsers dial HOST:PORT"),
        (["127.0.0.1:1", "hills"], "start two pages"),
        (["127.0.0.1:1", "--address", "192.0.2.1:1"], "--page-token-file"),
    ],
)
def test_what_cannot_be_served_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", *arguments]) == 2

    assert words in capsys.readouterr().err


def test_the_page_leaves_the_handlers_of_other_logs_open() -> None:
    class Handler(logging.NullHandler):
        is_open = True

        def close(self) -> None:
            self.is_open = False

    handler = Handler()

    assert main(["watch", "127.0.0.1:1", "--address", "unix:page"]) == 2

    assert handler.is_open
