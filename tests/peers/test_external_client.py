"""A simulator's machine: the base install, without Ray and torch, against our endpoints."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlmesh_ray import EnvServer, ModelServer

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venvs" / "base" / "bin" / "python"
COMMAND = ROOT / ".venvs" / "base" / "bin" / "rlmesh-ray"


def run(*arguments: str) -> str:
    assert PYTHON.exists(), "run `make .venvs/base/.ready` first (`make test` does)"
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=90, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_base_install_has_neither_ray_nor_torch() -> None:
    script = "from importlib.util import find_spec; print(find_spec('ray'), find_spec('torch'))"

    assert run(str(PYTHON), "-c", script).strip() == "None None"


def test_it_evaluates_a_served_policy_on_an_endpoint() -> None:
    def act(observations: Any) -> Any:
        return (observations[:, 2] + observations[:, 3] > 0).astype(np.int64)

    with EnvServer("CartPole-v1", num_envs=4) as env, ModelServer(act) as model:
        output = run(
            str(COMMAND), "evaluate", "--env", env.address, "--model", model.address,
            "--episodes", "5", "--seed", "1", "--json",
        )  # fmt: skip

    events = [json.loads(line) for line in output.splitlines()]
    assert events[-1]["event"] == "result"
    assert events[-1]["episodes"] == 5
    assert events[-1]["return_mean"] > 100


SCRIPT = """
import sys
import numpy as np
from rlmesh_ray import EnvServer, ModelServer, RemoteEnv, RemoteModel

def act(observations):
    return np.zeros(len(observations), int)

with EnvServer("CartPole-v1") as env_server, ModelServer(act) as model_server:
    env = RemoteEnv(env_server.address)
    observation, _ = env.reset(seed=0)
    with RemoteModel(model_server.address) as model:
        model.configure_route(env)
        action = model.predict(observation[None])
    env.step(action[0])
    env.close()
print(sorted({"ray", "torch"} & set(sys.modules)))
"""


def test_it_hosts_and_drives_environments_and_policies_by_itself() -> None:
    assert run(str(PYTHON), "-c", SCRIPT).strip() == "[]"


@pytest.mark.parametrize("package", ["rlmesh_ray.rllib", "rlmesh_ray.actors"])
def test_a_package_that_needs_ray_says_what_to_install(package: str) -> None:
    script = f"try:\n    import {package}\nexcept ImportError as e:\n    print(type(e).__name__, e)"

    assert run(str(PYTHON), "-c", script).strip() in {
        f"MissingPackageError {package} needs {name}, and ray is not installed: "
        "pip install '.[rllib]' in a checkout of rlmesh-ray"
        for name in ("Ray", "RLlib")
    }


def test_training_says_what_to_install() -> None:
    done = subprocess.run(
        [str(COMMAND), "train", "CartPole-v1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 1
    assert "pip install '.[rllib]'" in done.stderr
