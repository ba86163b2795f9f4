"""Serves an environment with the released rlmesh, until standard input ends.

``python -m tests.peers.rlmesh_released.serve_env ENV KIND NUM_ENVS [ADDRESS]`` writes its address
on one line. KIND is ``single``, ``vector`` (NEXT_STEP), ``disabled`` or ``same`` (vectors of those
autoreset modes), or ``lanes`` (a list of single environments).
"""

import functools
import sys
from typing import Any

import rlmesh  # type: ignore[import-not-found]  # of another virtual environment
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tests.peers.rlmesh_released.made import make

_MODES = {
    "vector": AutoresetMode.NEXT_STEP,
    "disabled": AutoresetMode.DISABLED,
    "same": AutoresetMode.SAME_STEP,
}


def main() -> None:
    name, kind, num_envs, *address = sys.argv[1:]
    one = functools.partial(make, name)
    env: Any
    match kind:
        case "single":
            env = one()
        case "lanes":
            env = [one() for _ in range(int(num_envs))]
        case _:
            env = SyncVectorEnv([one] * int(num_envs), autoreset_mode=_MODES[kind])
    with rlmesh.EnvServer(env, *(address or ["127.0.0.1:0"])) as server:
        server.start()
        sys.stdout.write(server.address.removeprefix("tcp://") + "\n")
        sys.stdout.flush()
        sys.stdin.read()


main()
