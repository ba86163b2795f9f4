"""Drives an endpoint with the clients of rlmesh 0.1.0b3 and writes what happened as JSON.

``python -m tests.peers.rlmesh_b3.drive ADDRESS KIND``, KIND being ``env``, ``vector`` or ``model``.
"""

import json
import sys
from typing import Any

from rlmesh.numpy import (  # type: ignore[import-not-found]  # of another virtual environment
    Model,
    RemoteEnv,
    RemoteVectorEnv,
)

from tests.peers.rlmesh_b3 import world


def _env(address: str) -> dict[str, Any]:
    env = RemoteEnv(address)
    trace = world.play(
        env, world.World.observation_space, world.actions(5, 7), seed=3, options={"steps": 1}
    )
    frame = env.render()
    env.close()
    contract = env.env_contract
    return {"id": contract.id, "metadata": env.metadata, "trace": trace, "frame": frame.tolist()}


def _vector(address: str) -> dict[str, Any]:
    env = RemoteVectorEnv(address)
    trace = world.play(env, world.World.observation_space, world.batches(2, 7), seed=[3, 4])
    env.close()
    return {"num_envs": env.num_envs, "trace": trace}


def _model(address: str) -> dict[str, Any]:
    result = Model(lambda seen: int(seen[2] + seen[3] > 0)).run(address, seeds=[0, 1])
    return {"returns": [episode.reward for episode in result.episodes]}


def main() -> None:
    address, kind = sys.argv[1:]
    reported = {"env": _env, "vector": _vector, "model": _model}[kind](address)
    sys.stdout.write(json.dumps(reported))


main()
