"""The released rlmesh's own EnvServer; runs in a virtual environment of its own.

``VENV/bin/python -I .../released_env_server.py HOSTING``. It must not import this package, which is
not installed there.
"""

import json
import runpy
import sys
from pathlib import Path

import gymnasium
from rlmesh import EnvServer  # type: ignore[import-not-found]  # of the other environment

_STAY = runpy.run_path(str(Path(__file__).parents[1] / "control.py"))["stay"]


def _main() -> None:
    server_spec = json.loads(sys.argv[1])
    env: object
    if server_spec["num_envs"] == 1:
        env = gymnasium.make(server_spec["env"])
    else:
        # Its lanes in a list would step independently, each with a request of its own.
        env = gymnasium.make_vec(server_spec["env"], server_spec["num_envs"], "sync")
    with EnvServer(env, "127.0.0.1:0") as server:
        server.start()
        _STAY(server.address)


if __name__ == "__main__":
    _main()
