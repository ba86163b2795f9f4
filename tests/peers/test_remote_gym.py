"""remote-gym, both ways: its server under our client and RLlib, its client on our server.

It lives in a virtual environment of its own, which ``make`` builds.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlmesh_ray import EnvServer, RemoteVectorEnv, evaluate
from rlmesh_ray.dialects.dm_env_rpc.client.settings import DmEnvRpcSettings

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venvs" / "remote_gym" / "bin" / "python"
HERE = Path(__file__).parent / "remote_gym"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    assert PYTHON.exists(), "run `make .venvs/remote_gym/.ready` first (`make test-slow` does)"
    process = subprocess.Popen(
        [PYTHON, "-I", HERE / "serve.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # it logs each question that it does not know
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        yield f"dm_env_rpc://{process.stdout.readline().strip()}"
        process.stdin.close()


def worlds(*arguments: dict[str, Any]) -> DmEnvRpcSettings:
    """Settings of one lane for each of ``arguments``, which its environment is made with."""
    create = [{"args": json.dumps({"entrypoint_kwargs": each})} for each in arguments]
    return DmEnvRpcSettings(num_envs=len(create), create=create, time_limit_steps=500)


def played(env: gymnasium.Env[Any, Any], seed: int, actions: list[int]) -> list[list[Any]]:
    """What an environment shows, with a reset after each end, in which an action is lost."""
    first, _ = env.reset(seed=seed)
    rows: list[list[Any]] = [[first, 0.0, False, False]]
    for action in actions:
        if rows[-1][2] or rows[-1][3]:
            rows.append([env.reset()[0], 0.0, False, False])
        else:
            rows.append(list(env.step(np.int64(action))[:4]))
    return rows


def test_its_environments_are_those_of_gymnasium(server: str) -> None:
    actions = np.random.default_rng(0).integers(0, 2, 60).tolist()
    expected = [played(gymnasium.make("CartPole-v1"), seed, actions) for seed in (3, 4)]

    env = RemoteVectorEnv(server, dm_env_rpc=worlds({"seed": 3}, {"seed": 4}))
    assert env.single_observation_space == gymnasium.make("CartPole-v1").observation_space
    assert env.single_action_space == gymnasium.make("CartPole-v1").action_space
    rows = [(env.reset()[0], *np.zeros((3, 2)))]
    rows += [env.step(np.array([action] * 2))[:4] for action in actions]
    env.close()

    for lane, own in enumerate(expected):
        for row, theirs in zip(rows, own, strict=True):
            np.testing.assert_array_equal(row[0][lane], theirs[0])
            assert [row[1][lane], row[2][lane], row[3][lane]] == theirs[1:]
    assert any(row[2] for row in expected[0])


def test_its_time_limits_are_distinguished_from_ends(server: str) -> None:
    def swing(observation: Any) -> Any:
        return np.zeros((len(observation), 1), np.float32)

    settings = worlds({"name": "Pendulum-v1"})
    episode = evaluate(RemoteVectorEnv(server, dm_env_rpc=settings), swing, episodes=1).episodes[0]
    assert (episode.length, episode.terminated) == (200, True)

    limited = DmEnvRpcSettings(create=settings.create, time_limit_steps=200)
    env = RemoteVectorEnv(server, dm_env_rpc=limited)
    episode = evaluate(env, swing, episodes=1).episodes[0]
    env.close()
    assert (episode.length, episode.truncated, episode.terminated) == (200, True, False)


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_ppo_learns_on_it(server: str, tmp_path: Path) -> None:
    options = ["--lanes", "4", "--time-limit", "500", "--iterations", "5", "--batch", "1024"]

    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "train_on_dm_env_rpc.py", server, *options],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": "local"},
        check=False,
    )

    assert done.returncode == 0, done.stderr
    returns = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert len(returns) == 5
    assert returns[-1] > 2 * returns[0]


def test_its_client_drives_our_server() -> None:
    actions = [0, 1, 1] * 12
    with EnvServer("CartPole-v1") as ours:
        host, _, port = ours.address.rpartition(":")
        done = subprocess.run(
            [PYTHON, "-I", HERE / "drive.py", host, port, "".join(map(str, actions))],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)

    local = gymnasium.make("CartPole-v1")
    # It has never known the bounds of single elements, nor seeds.
    assert seen["spaces"][1] == str(local.action_space)
    assert len(seen["steps"]) > len(actions)
    ends = [row[2] for row in seen["steps"]]
    assert any(ends)
    for (observation, *_), action, (later, reward, *_), is_end in zip(
        seen["steps"], _with_resets(actions, ends), seen["steps"][1:], ends, strict=False
    ):
        if action is None:
            assert is_end
            continue
        local.reset()
        local.unwrapped.state = np.array(observation, np.float64)  # type: ignore[attr-defined]
        np.testing.assert_allclose(local.step(action)[0], later, rtol=1e-4, atol=1e-6)
        assert reward == 1.0


def _with_resets(actions: list[int], ends: list[bool]) -> Iterator[int | None]:
    """Yield what led from each row to the next one; None: a reset."""
    left = iter(actions)
    for is_end in ends:
        yield None if is_end else next(left, None)
