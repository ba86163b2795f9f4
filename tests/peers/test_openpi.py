"""openpi's published client and codec, in an environment of their own, at both ends.

``make`` builds that environment; its NumPy is older than ours.
"""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray import ListenOptions, ModelServer, RemoteModel
from rlmesh_ray.errors import RemoteModelError
from tests.loopback.openpi_peer import Arm

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "peers" / "openpi"
PYTHON = ROOT / ".venvs" / "openpi" / "bin" / "python"
TIMEOUT_S = 60.0


def command(script: str, *arguments: object) -> list[str]:
    assert PYTHON.exists(), "run `make .venvs/openpi/.ready` first (`make test-slow` does)"
    return [str(PYTHON), "-W", "ignore", str(FOLDER / script), *map(str, arguments)]


def output_of(script: str, *arguments: object) -> str:
    done = subprocess.run(
        command(script, *arguments), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def chunks(observations: Any) -> Any:
    """Return three actions a row, from twice the state on."""
    return np.stack([2 * observations["observation/state"] + step for step in range(3)], axis=1)


def test_the_recorded_messages_are_those_of_the_published_codec() -> None:
    assert json.loads(output_of("record.py")) == json.loads((FOLDER / "messages.json").read_text())


@pytest.mark.parametrize("token", ["", "s3cret"])
def test_the_published_client_and_its_broker_use_our_server(token: str) -> None:
    with ModelServer(
        chunks,
        horizon=3,
        address=ListenOptions(openpi="127.0.0.1:0"),
        openpi_env=Arm(),
        token=token or None,
    ) as server:
        assert server.openpi_address is not None
        host, _, port = server.openpi_address.rpartition(":")
        found = json.loads(output_of("infer.py", host, port, token, 3, 5))
        statistics = server.statistics()

    assert found["actions"] == [[0, 0], [1, 1], [2, 2], [6, 6], [7, 7]]
    assert found["metadata"]["action_horizon"] == "3"
    assert "lacks 'observation/image', 'prompt'" in found["error"]
    assert "Traceback" not in found["error"]
    assert (statistics.items, statistics.errors) == (3, {"INVALID_REQUEST": 1})


@contextlib.contextmanager
def serving() -> Iterator[str]:
    process = subprocess.Popen(command("serve.py"), stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            yield f"openpi://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


class Nested:
    """An arm whose observations nest Dicts."""

    observation_space = spaces.Dict(
        {"observation": spaces.Dict({"state": spaces.Box(-10, 10, (2,), np.float32)})}
    )
    action_space = Arm.action_space


class Stateless:
    """An environment without what the server needs."""

    observation_space = spaces.Dict({"camera": spaces.Box(-1, 1, (2,), np.float32)})
    action_space = Arm.action_space


def test_our_client_uses_a_server_with_the_published_codec() -> None:
    observation = {"observation": {"state": np.array([[0.5, 1.0]], np.float32)}}
    with serving() as address:
        with RemoteModel(address) as model:
            model.configure_route(Nested())
            actions = model.predict(observation)
            found = model.predict_chunk(observation)
            telemetry = model.last_telemetry()
        with RemoteModel(address) as model:
            model.configure_route(Stateless())
            with pytest.raises(RemoteModelError, match=r"KeyError\('observation'\)") as caught:
                model.predict({"camera": np.zeros((1, 2), np.float32)})

    assert actions.tolist() == [[1.0, 2.0]]
    assert found.tolist() == [[[1.0, 2.0], [2.0, 3.0], [3.0, 4.0]]]
    assert telemetry is not None
    assert telemetry.forward_s == pytest.approx(0.0025)
    assert not caught.value.is_recoverable
