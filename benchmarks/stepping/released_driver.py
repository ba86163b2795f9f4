"""Steps environments of the released rlmesh; runs in a virtual environment of its own.

``VENV/bin/python -I .../released_driver.py``; reads a ``ClientSpec``. It must not import this
package, which is not installed there.
"""

import itertools
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rlmesh.numpy import (  # type: ignore[import-not-found]  # of the other environment
    Model,
    RemoteEnv,
    RemoteVectorEnv,
)

_STOPWATCH = runpy.run_path(str(Path(__file__).with_name("stopwatch.py")))
_SEED = 0
_NUM_ACTIONS = 256


def _main() -> None:
    client_spec = json.loads(sys.stdin.readline())
    times = {"warm_up_s": client_spec["warm_up_s"], "seconds": client_spec["seconds"]}
    (address,) = client_spec["addresses"]
    match client_spec["mode"]:
        case "single":
            _STOPWATCH["time_steps"](_single_step(RemoteEnv(address)), **times)
        case "vector":
            _STOPWATCH["time_steps"](_vector_step(RemoteVectorEnv(address)), **times)
        case "evaluation":
            _STOPWATCH["time_in_bulk"](_evaluation(address), **times)


def _single_step(env: Any) -> Callable[[], int]:
    rng = np.random.default_rng(_SEED)
    actions = itertools.cycle([int(action) for action in rng.integers(2, size=_NUM_ACTIONS)])
    env.reset(seed=_SEED)

    def step() -> int:
        _, _, terminated, truncated, _ = env.step(next(actions))
        if terminated or truncated:
            env.reset()
        return 1

    return step


def _vector_step(venv: Any) -> Callable[[], int]:
    rng = np.random.default_rng(_SEED)
    num_envs: int = venv.num_envs
    actions = itertools.cycle(list(rng.integers(2, size=(_NUM_ACTIONS, num_envs))))
    venv.reset(seed=_SEED)

    def step() -> int:
        venv.step(next(actions))
        return num_envs

    return step


def _evaluation(address: str) -> Callable[[int], int]:
    model = Model(_follow_the_pole)

    def work(episodes: int) -> int:
        return sum(episode.steps for episode in model.run(address, episodes=episodes).episodes)

    return work


def _follow_the_pole(observation: Any) -> int:
    return int(observation[3] > 0)


if __name__ == "__main__":
    _main()
