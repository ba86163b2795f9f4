"""The example of several replicas behind one address, used by a program outside."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from rlmesh_ray import RemoteModel, TokenFile
from rlmesh_ray.errors import AccessDeniedError
from tests.loopback.ports import free_address

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve_behind_one_address.py"
POLICY = """
import numpy as np

def make():
    return lambda observations: np.ones(len(observations), np.int64)
"""


@pytest.mark.ray
@pytest.mark.parametrize(
    "ending", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)]
)
def test_programs_use_replicas_by_one_address_and_a_token_from_a_file(
    tmp_path: Path, ending: signal.Signals
) -> None:
    (tmp_path / "right.py").write_text(POLICY)
    token_file = tmp_path / "token"
    token_file.write_text("s3cret\n")
    token_file.chmod(0o600)
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLE), "right:make", "--address", free_address(),
         "--token-file", "token"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        # A Ray that runs on this machine is not the test's.
        env={**os.environ, "RAY_ADDRESS": "local", "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        address = words[2].removesuffix(":")
        assert words[3:] == ["2", "replicas"]

        with RemoteModel(address, token=TokenFile(token_file)) as model:
            model.configure_route(gymnasium.make_vec("CartPole-v1", num_envs=3))
            actions = model.predict(np.zeros((3, 4), np.float32))

        assert actions.tolist() == [1, 1, 1]
        with pytest.raises(AccessDeniedError):
            RemoteModel(address)
        process.send_signal(ending)
        assert process.wait(60.0) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.ray
def test_what_cannot_be_served_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    (tmp_path / "token").chmod(0o600)
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "nothing:make", "--address", free_address(),
         "--token-file", "token"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": "local"},
        check=False,
    )  # fmt: skip

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr
