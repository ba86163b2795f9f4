"""Drives an environment by remote-gym's client; runs in a virtual environment of its own.

``VENV/bin/python -I .../drive.py HOST PORT ACTIONS``: resets once, steps with the digits of
ACTIONS, resets after each end, and prints what came, as JSON: a list a step. It must not import
this project, which is not installed there.
"""

import json
import sys
from typing import Any

import numpy as np
from remote_gym import RemoteEnvironment  # type: ignore[import-not-found]


def _main() -> None:
    host, port, actions = sys.argv[1:]
    env = RemoteEnvironment(host, int(port))
    first, _ = env.reset()
    spaces = [str(env.observation_space), str(env.action_space)]
    rows: list[list[Any]] = [[np.asarray(first).tolist(), 0.0, False, False]]
    for digit in actions:
        observation, reward, terminated, truncated, _ = env.step(np.int64(digit))
        rows.append([observation.tolist(), float(reward), bool(terminated), bool(truncated)])
        if terminated or truncated:
            first, _ = env.reset()
            rows.append([np.asarray(first).tolist(), 0.0, False, False])
    env.close()
    sys.stdout.write(json.dumps({"spaces": spaces, "steps": rows}))


if __name__ == "__main__":
    _main()
