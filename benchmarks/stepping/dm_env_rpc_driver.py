"""dm_env_rpc's own client; runs in a virtual environment of its own.

``VENV/bin/python -I .../dm_env_rpc_driver.py``; reads a ``ClientSpec``. It must not import this
package, which is not installed there.
"""

import itertools
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from dm_env_rpc.v1 import connection, dm_env_adaptor

_STOPWATCH = runpy.run_path(str(Path(__file__).with_name("stopwatch.py")))
_NUM_ACTIONS = 256


def _main() -> None:
    client_spec = json.loads(sys.stdin.readline())
    (address,) = client_spec["addresses"]
    with connection.Connection(grpc.insecure_channel(address)) as link:
        env, _world = dm_env_adaptor.create_and_join_world(link, {}, {})
        times = {"warm_up_s": client_spec["warm_up_s"], "seconds": client_spec["seconds"]}
        _STOPWATCH["time_steps"](_step(env), **times)


def _step(env: Any) -> Callable[[], int]:
    rng = np.random.default_rng(0)
    ((name, spec),) = env.action_spec().items()
    moves = rng.integers(spec.minimum, spec.maximum + 1, size=_NUM_ACTIONS).astype(spec.dtype)
    actions = itertools.cycle([{name: move} for move in moves])
    env.reset()

    def step() -> int:
        # dm_env: the step after the last one of an episode begins the next one.
        if env.step(next(actions)).last():
            env.reset()
        return 1

    return step


if __name__ == "__main__":
    _main()
