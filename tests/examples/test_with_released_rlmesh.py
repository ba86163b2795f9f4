"""The example for users of the released rlmesh runs where only that is installed."""

import subprocess
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlmesh_ray import EnvServer, ModelServer
from tests.peers.rlmesh_released.peer import PYTHON, ROOT, TIMEOUT_S

pytestmark = pytest.mark.slow

EPISODES = 3


def follow_the_pole(observations: Any) -> Any:
    """Do for a batch what the example's own policy does."""
    return (observations[:, 2] + observations[:, 3] > 0).astype(np.int64)


def reported(*addresses: str) -> list[str]:
    """Run the example; return its lines."""
    command = [PYTHON, ROOT / "examples" / "with_released_rlmesh.py", *addresses]
    options = ["--episodes", str(EPISODES)]
    done = subprocess.run(
        [*map(str, command), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def in_gymnasium() -> list[str]:
    """Return what the same episodes are without any endpoint."""
    env, lines = gymnasium.make("CartPole-v1"), []
    for seed in range(EPISODES):
        (observation, _), steps, has_ended = env.reset(seed=seed), 0, False
        while not has_ended:
            action = int(follow_the_pole(observation[None])[0])
            observation, _, terminated, truncated, _ = env.step(action)
            steps, has_ended = steps + 1, terminated or truncated
        lines.append(f"seed {seed}: {steps} steps, reward {steps}")
    env.close()
    return lines


def test_the_example_runs_the_same_episodes_with_its_own_policy_and_with_ours() -> None:
    with EnvServer("CartPole-v1") as env, ModelServer(follow_the_pole) as model:
        assert reported(env.address) == reported(env.address, model.address) == in_gymnasium()
