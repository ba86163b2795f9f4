"""The live page on Ray: endpoints of the registry, with the tokens of their fleets and pools."""

import contextlib
import json
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from benchmarks.watching.cart_pole import DrawnCartPole
from rlmesh_ray import RemoteVectorEnv
from rlmesh_ray.actors import EnvFleet, EnvPool
from rlmesh_ray.actors.registry.endpoint_resolver import ClusterEndpoints
from rlmesh_ray.auth.token_file import endpoint_token
from rlmesh_ray.watch.live import LiveView
from tests.loopback.eventually import eventually
from tests.ray.test_pools import SECRET, simulator

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture(scope="module")
def fleet(local_ray: None) -> Iterator[EnvFleet]:
    with EnvFleet(DrawnCartPole, num_envs=2, num_cpus=0.1) as fleet:
        yield fleet


@contextlib.contextmanager
def stepping(address: str, token: str) -> Iterator[None]:
    """Have a session of two steps at an endpoint."""
    envs = RemoteVectorEnv(address, token=token)
    try:
        envs.reset(seed=1)
        for _ in range(2):
            envs.step(np.zeros(envs.num_envs, np.int64))
        yield
    finally:
        envs.close()


def drawn(live: LiveView, endpoint_id: str) -> bytes | None:
    """Return a picture of the first lane of an endpoint's only session."""
    found = live.endpoints()["endpoints"]
    (key,) = [each["key"] for each in found if each["endpoint_id"] == endpoint_id]
    answer = live.sessions(key)
    assert answer is not None
    assert answer["problem"] == ""
    (session,) = answer["sessions"]
    assert session["num_steps"] == 2
    picture = live.picture(key, session["name"], 0)
    assert picture is not None
    assert picture.problem == ""
    return picture.png


def test_the_lanes_of_a_fleet_are_seen_with_its_own_token(fleet: EnvFleet) -> None:
    live = LiveView(ClusterEndpoints("Ray"))
    with stepping(fleet.addresses[0], fleet.tokens[0]):
        (endpoint_id,) = [
            each["endpoint_id"]
            for each in live.endpoints()["endpoints"]
            if each["address"] == fleet.addresses[0]
        ]

        assert drawn(live, endpoint_id)


@pytest.mark.usefixtures("fleet")  # which is not the pool's
def test_a_pool_is_watched_by_its_name_with_the_tokens_of_its_endpoints() -> None:
    with (
        EnvPool("watched", token=SECRET) as pool,
        simulator(pool, "one", DrawnCartPole, num_envs=2) as server,
    ):
        source = ClusterEndpoints("Ray", ["watched"])
        assert eventually(source.endpoints)
        live = LiveView(source)
        with stepping(server.address, endpoint_token(SECRET, "watched", "one")):
            (seen,) = live.endpoints()["endpoints"]

            assert (seen["fleet"], seen["state"]) == ("pool/watched", "live")
            assert drawn(live, seen["endpoint_id"])


@contextlib.contextmanager
def command(*words: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a command until the block ends."""
    full = [sys.executable, "-m", "rlmesh_ray", *words, "--json"]
    with subprocess.Popen(full, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


def event(process: "subprocess.Popen[str]", kind: str) -> dict[str, Any]:
    """Return the next event of that kind."""
    assert process.stdout is not None
    while True:
        found: dict[str, Any] = json.loads(process.stdout.readline())
        if found["event"] == kind:
            return found


def answer(url: str, path: str, **values: object) -> bytes:
    """Ask a page; return the body of its answer."""
    query = urllib.parse.urlencode(values)
    with urllib.request.urlopen(f"{url}/api/{path}?{query}", timeout=30.0) as reply:
        body: bytes = reply.read()
    return body


@pytest.mark.slow
def test_a_training_of_the_command_line_is_watched_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = ray.get_runtime_context().gcs_address
    monkeypatch.setenv("RAY_ADDRESS", address)
    folder = ["--checkpoint-dir", str(tmp_path / "run")]
    env = "benchmarks.watching.cart_pole:DrawnCartPole"
    with (
        command("train", env, "--num-envs", "4", "--stop-iters", "500", *folder) as training,
        command("watch", "ray", "--address", "127.0.0.1:0") as watching,
    ):
        (trained,) = event(training, "training")["endpoints"]
        url = event(watching, "watching")["url"]
        event(training, "progress")

        def endpoint() -> dict[str, Any]:
            found = json.loads(answer(url, "endpoints"))["endpoints"]
            return next((each for each in found if each["address"] == trained), {})

        assert eventually(lambda: endpoint().get("lane_steps_per_s"))
        key = endpoint()["key"]
        (session,) = json.loads(answer(url, "sessions", endpoint=key))["sessions"]
        values = {"endpoint": key, "session": session["name"], "lane": 3}
        assert eventually(lambda: answer(url, "picture", **values))
        picture = answer(url, "picture", **values)

        ours = [endpoint()["endpoint_id"]]
        runners = json.loads(answer(url, "endpoints"))["runners"]
        (runner,) = [each for each in runners if each["endpoint_ids"] == ours]
        assert runner["name"].startswith("training runner ")
        assert endpoint()["sessions"] == runner["num_sessions"] == 1
        assert session["num_lane_steps"] > 0
        assert picture.startswith(b"\x89PNG")
