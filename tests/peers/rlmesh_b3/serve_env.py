"""Serves World or a Gymnasium id with rlmesh 0.1.0b3, until standard input ends.

``python -m tests.peers.rlmesh_b3.serve_env ENV NUM_ENVS`` writes its address on one line.
"""

import sys
from typing import Any

import gymnasium
import rlmesh  # type: ignore[import-not-found]  # of another virtual environment

from tests.peers.rlmesh_b3.world import World


def main() -> None:
    name, num_envs = sys.argv[1], int(sys.argv[2])

    def make() -> gymnasium.Env[Any, Any]:
        return World() if name == "World" else gymnasium.make(name)

    env = make() if num_envs == 1 else gymnasium.vector.SyncVectorEnv([make] * num_envs)
    with rlmesh.EnvServer(env, "127.0.0.1:0") as server:
        server.start()
        sys.stdout.write(server.address.removeprefix("tcp://") + "\n")
        sys.stdout.flush()
        sys.stdin.read()


main()
