"""Every example runs, with small settings, as its users run it."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlmesh_ray import EnvServer, ListenOptions, ModelServer

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--iterations", "1", "--batch", "256"]


def run(
    name: str,
    *arguments: str,
    folder: Path,
    token: str = "",
    variables: Mapping[str, str] = MappingProxyType({}),
) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder,
        env={**os.environ, "RLMESH_RAY_TOKEN": token, **variables},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def fleet_run(
    tmp_path_factory: pytest.TempPathFactory, ray_of_programs: dict[str, str]
) -> tuple[str, Path]:
    """What train_on_fleet.py prints, and the checkpoint that it writes."""
    folder = tmp_path_factory.mktemp("fleet")
    small = ["--lanes", "4", "--out", "made", *SMALL]
    output = run("train_on_fleet.py", *small, folder=folder, variables=ray_of_programs)
    return output, folder / "made"


def test_every_example_is_run_here() -> None:
    sources = [path.read_text() for path in Path(__file__).parent.glob("test_*.py")]

    for path in EXAMPLES.glob("*.py"):
        assert any(f'"{path.name}"' in source for source in sources), path


@pytest.mark.slow
@pytest.mark.ray
def test_train_on_fleet(fleet_run: tuple[str, Path]) -> None:
    output, checkpoint = fleet_run

    assert output.splitlines()[0].count(":") == 3  # the line's own, and one an endpoint
    assert "iteration 1: mean return" in output
    assert (checkpoint / "rllib_checkpoint.json").is_file()


@pytest.mark.slow
@pytest.mark.ray
def test_serve_and_query(fleet_run: tuple[str, Path], tmp_path: Path) -> None:
    _, checkpoint = fleet_run

    output = run("serve_and_query.py", str(checkpoint), "--steps", "5", folder=tmp_path)

    assert "5 steps earned 5.0 a lane" in output


def test_own_environments(tmp_path: Path) -> None:
    output = run("own_environments.py", folder=tmp_path)

    assert output.splitlines()[0] == "{'battery': (8, 1), 'camera': (8, 1, 16, 3)}"
    assert "40 steps forth earned" in output


# train_on_fleet.py starts, trains and ends in the same way; the command trains on an address.
@pytest.mark.slow
@pytest.mark.ray
def test_train_on_endpoint(tmp_path: Path, ray_of_programs: dict[str, str]) -> None:
    with EnvServer("CartPole-v1", num_envs=4, token="s3cret") as server:
        output = run(
            "train_on_endpoint.py",
            server.address,
            *SMALL,
            folder=tmp_path,
            token="s3cret",
            variables=ray_of_programs,
        )

    assert "iteration 1: mean return" in output


@pytest.mark.slow
@pytest.mark.ray
def test_serve_while_training(tmp_path: Path, ray_of_programs: dict[str, str]) -> None:
    small = ["--iterations", "2", "--batch", "256"]

    output = run("serve_while_training.py", *small, folder=tmp_path, variables=ray_of_programs)

    assert "iteration 2: mean return" in output
    assert "the served policy is version 2" in output
    assert "version 0 chose actions" in output


def test_evaluate_from_outside(tmp_path: Path) -> None:
    def balance(observations: Any) -> Any:
        return (observations[:, 2] + observations[:, 3] > 0).astype(np.int64)

    with EnvServer("CartPole-v1", num_envs=2) as env, ModelServer(balance) as model:
        arguments = ["--env", env.address, "--model", model.address, "--episodes", "3"]

        output = run("evaluate_from_outside.py", *arguments, folder=tmp_path)

    assert output.count("episode ") == 3
    assert "over 3 episodes" in output


def test_openpi_client(tmp_path: Path) -> None:
    def balance(observations: Any) -> Any:
        return (observations[:, 2] > 1).astype(np.int64)

    with ModelServer(
        balance,
        address=ListenOptions(openpi="127.0.0.1:0"),
        openpi_env=gymnasium.make("CartPole-v1"),
        token="s3cret",
    ) as model:
        assert model.openpi_address is not None
        output = run("openpi_client.py", model.openpi_address, folder=tmp_path, token="s3cret")

    lines = output.splitlines()
    assert lines[0] == "the policy takes ['observation']"
    assert [line.rpartition(": ")[2] for line in lines[1:]] == ["[0]", "[0]", "[1]"]


@pytest.mark.slow
def test_chunked_policy(tmp_path: Path) -> None:
    output = run("chunked_policy.py", "--quick", "--out", "arm.png", folder=tmp_path)

    _, baseline, _, *rows, _ = output.splitlines()
    assert float(baseline.split()[-2]) < 10  # cm; the arm is a metre long
    counts = {row[:20].strip(): list(map(int, row[20:].split()[1:4])) for row in rows}
    assert len(counts) == 4
    # How many actions are played depends on the machine, and so does all that is asked for ahead.
    actions, starved, late = counts["one action a request"]
    assert (starved, late) == (actions - 1, 0)
    actions, starved, late = counts["chunks, no prefetch"]
    assert (starved, late) == ((actions - 1) // 8, 0)
    assert (tmp_path / "arm.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.ray
def test_conflicting_dependencies(tmp_path: Path, ray_of_programs: dict[str, str]) -> None:
    small = ["--endpoints", "1", "--lanes", "4", *SMALL]

    output = run("conflicting_dependencies.py", *small, folder=tmp_path, variables=ray_of_programs)

    assert "the trainer has toy_physics 1.0; the simulator here: cannot import" in output
    assert "iteration 1: mean return -" in output


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(
    "way",
    [
        pytest.param([], id="through endpoints"),
        pytest.param(["--local"], id="RLlib's own way", marks=pytest.mark.nightly),
    ],
)
def test_switch_an_existing_script(
    way: list[str], tmp_path: Path, ray_of_programs: dict[str, str]
) -> None:
    small = ["--iterations", "2", "--batch", "256", "--lanes", "2", "--out", "made"]

    output = run(
        "switch_an_existing_script.py", *small, *way, folder=tmp_path, variables=ray_of_programs
    )

    first, second, *_ = output.splitlines()
    assert first.startswith("iteration 1: mean return ")
    assert "longest episode" in first
    assert "evaluated at" in second
    assert (tmp_path / "made" / "rllib_checkpoint.json").is_file()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(
    ("way", "fast_path"),
    [
        pytest.param([], "it has FrameStacking, ScalePixels", id="connectors"),
        pytest.param(["--in-module", "--frames", "1"], "fast path: taken", id="module"),
    ],
)
def test_train_from_images(
    way: list[str], fast_path: str, tmp_path: Path, ray_of_programs: dict[str, str]
) -> None:
    small = ["--lanes", "4", *SMALL]

    output = run("train_from_images.py", *small, *way, folder=tmp_path, variables=ray_of_programs)

    assert "iteration 1: mean return -" in output
    assert fast_path in output


@pytest.mark.nightly
@pytest.mark.ray
def test_train_from_images_learns(tmp_path: Path, ray_of_programs: dict[str, str]) -> None:
    output = run("train_from_images.py", folder=tmp_path, variables=ray_of_programs)

    last = [line for line in output.splitlines() if line.startswith("iteration")][-1]
    assert float(last.split()[-1]) > 0.8
