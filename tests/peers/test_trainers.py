"""Stable-Baselines3 and TorchRL train on our endpoints, and see what they see of gymnasium's own.

So does gymnasium's video recorder, which needs moviepy. Their packages lie in a folder of their
own, which ``make`` fills.
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlmesh_ray import EnvServer

ROOT = Path(__file__).parents[2]
EXTRA = ROOT / ".venvs" / "trainers"
ENV_IDS = ["CartPole-v1", "Pendulum-v1"]
KINDS = ["next_step", "disabled", "same_step"]
# Each kind of lanes and each environment once; all pairs at night.
SOON = [
    (1, "next_step", "CartPole-v1"),
    (3, "disabled", "Pendulum-v1"),
    (3, "same_step", "CartPole-v1"),
]

pytestmark = pytest.mark.slow


def reported(script: str, *arguments: str) -> Any:
    """Run one of the scripts; return what it prints."""
    assert (EXTRA / "stable_baselines3").exists(), (
        "run `make .venvs/trainers/.ready` first (`make test-slow` does)"
    )
    done = subprocess.run(
        [sys.executable, "-m", f"tests.peers.trainers.{script}", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(EXTRA), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def each_environment(lanes: Iterable[tuple[int, str]]) -> list[Any]:
    """Return numbers and kinds of lanes, with each environment, as parameters of a test."""
    return [
        pytest.param(*each, env_id, marks=() if (*each, env_id) in SOON else pytest.mark.nightly)
        for each in lanes
        for env_id in ENV_IDS
    ]


def sb3(task: str, **arguments: Any) -> Any:
    return reported("train_sb3", task, json.dumps(arguments))


def served(env_id: str, num_envs: int, kind: str) -> EnvServer:
    """Serve lanes that reset themselves or not, or a vector that does so within the step."""
    if kind == "same_step":
        lanes = [lambda: gymnasium.make(env_id)] * num_envs
        return EnvServer(lambda: SyncVectorEnv(lanes, autoreset_mode=AutoresetMode.SAME_STEP))
    return EnvServer(env_id, num_envs=num_envs, autoreset=kind)


@pytest.mark.parametrize(
    ("num_envs", "kind", "env_id"), each_environment(itertools.product([1, 3], KINDS))
)
def test_sb3_sees_what_it_sees_of_local_environments(env_id: str, num_envs: int, kind: str) -> None:
    with served(env_id, num_envs, kind) as server:
        ours, theirs = sb3(
            "steps", address=server.address, num_envs=num_envs, env_id=env_id, num_steps=500
        )

    assert ours == theirs
    infos = [info for row in ours[2:] for info in row[3]]
    assert sum("terminal_observation" in info for info in infos) >= 2
    assert any(info["TimeLimit.truncated"] for info in infos) == (env_id == "Pendulum-v1")


def test_sb3_sees_the_same_over_dm_env_rpc() -> None:
    with EnvServer("CartPole-v1", num_envs=3) as server:
        address = f"dm_env_rpc://{server.address}"
        ours, theirs = sb3(
            "steps", address=address, num_envs=3, env_id="CartPole-v1", num_steps=100
        )

    assert ours == theirs


def test_ppo_of_sb3_trains_and_evaluates() -> None:
    with EnvServer("CartPole-v1", num_envs=4) as server:
        seen = sb3("train", address=server.address)

    assert seen["steps"] == 2000
    assert seen["episodes"] > 10
    assert len(seen["returns"]) == 5
    assert min(seen["returns"]) >= 8  # in fewer steps no pole falls


class Tasked(gymnasium.Env[Any, Any]):
    """Observes its task, and draws it."""

    observation_space = gymnasium.spaces.Discrete(100)
    action_space = gymnasium.spaces.Discrete(2)
    render_mode = "rgb_array"
    secret = 5

    def __init__(self) -> None:
        self.task = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.task = (options or {}).get("task", self.task)
        return self.task, {}

    def step(self, action: Any) -> Any:
        return self.task, 0.0, False, False, {}

    def plus(self, number: int) -> int:
        return self.task + number

    def render(self) -> Any:
        return np.full((2, 2, 3), float(self.task))  # SB3 does not mind the dtype


def test_sb3_reaches_into_the_lanes_where_the_operator_allows_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    allowed = ("task", "plus", "missing", "set_wrapper_attr")
    with EnvServer(Tasked, num_envs=3, allow_calls=allowed) as server:
        seen = sb3("calls", address=server.address)

    refused = seen.pop("refused")
    assert seen == {
        "reset": [0, 1, 2],
        "render_mode": ["rgb_array"] * 3,
        "get_attr": [7, 1, 7],
        "subset": [4],
        "none": [],
        "has_attr": [True, True, False],
        "is_wrapped": [False] * 3,
        "images": [np.full((2, 2, 3), task, np.uint8).tolist() for task in (7, 1, 7)],
        "picture": [4, 4, 3],
    }
    assert "has no picture: reset() before render()" in refused[0]
    assert "missing 1 required positional argument" in refused[1]
    assert "allow_calls=('secret',)" in refused[2]
    assert refused[3] == "plus: arguments travel by position; give more so"
    assert refused[4] == "token: these are for an address; give them to RemoteVectorEnv"
    failures = [text for text in caplog.messages if "the environment raised an error" in text]
    assert len(failures) == 1, "looking for an attribute is not a failure"
    assert "plus() missing" in failures[0]


def test_sb3_finds_methods_without_calling_them_where_the_operator_allows_it() -> None:
    with EnvServer(Tasked, num_envs=2, allow_calls=("has_wrapper_attr",)) as server:
        assert sb3("finds", address=server.address) == [True, True, False]


@pytest.mark.parametrize(
    ("num_envs", "kind", "env_id"), each_environment(zip([1, 3, 3], KINDS, strict=True))
)
def test_torchrl_sees_what_it_sees_of_local_environments(
    env_id: str, num_envs: int, kind: str
) -> None:
    modes = {"disabled": AutoresetMode.DISABLED, "same_step": AutoresetMode.SAME_STEP}
    mode = modes.get(kind, AutoresetMode.NEXT_STEP).value
    arguments = {"num_envs": num_envs, "env_id": env_id, "mode": mode, "num_steps": 210}

    with served(env_id, num_envs, kind) as server:
        ours, theirs = reported(
            "train_torchrl", json.dumps({"address": server.address, **arguments})
        )

    assert ours == theirs
    dones = np.array(ours[-1][1])
    assert dones.sum() >= num_envs


class Filmed(gymnasium.Env[Any, Any]):
    """Ends after five steps, and shows as many bright rows as steps were done."""

    observation_space = gymnasium.spaces.Discrete(6)
    action_space = gymnasium.spaces.Discrete(2)
    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    render_mode = "rgb_array"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.steps = 0
        return 0, {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.steps, 0.0, self.steps == 5, False, {}

    def render(self) -> Any:
        picture = np.zeros((32, 48, 3), np.uint8)
        picture[: self.steps] = 255
        return picture


def test_gymnasiums_recorder_films_an_episode_of_all_lanes(tmp_path: Path) -> None:
    with EnvServer(Filmed, num_envs=2) as server:
        videos = reported("record_video", server.address, str(tmp_path / "videos"))

    assert videos == {"rl-video-episode-0.mp4": [6, 96, 32]}  # the lanes side by side
