"""Steps a simulator through an endpoint and in this process, and says whether both are equal.

``python -m tests.simulators.compare NAME`` prints a JSON object; run by the Python that has the
simulators.
"""

import json
import sys
from typing import Any

import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv

from rlmesh_ray import EnvServer, RemoteVectorEnv
from rlmesh_ray.testing.equality import assert_identical
from tests.simulators import factories

NUM_STEPS = 500
SEED = 1


def local_vector(made: Any) -> VectorEnv[Any, Any, Any]:
    return made if isinstance(made, VectorEnv) else SyncVectorEnv([lambda: made])


def compare(name: str) -> dict[str, Any]:
    """Return how many steps were equal, or why there were none."""
    factory = getattr(factories, name)
    if not hasattr(factory(), "observation_space") or callable(factory().observation_space):
        return {"steps": 0, "reason": "several agents, which no vector of gymnasium's has"}
    local = local_vector(factory())
    with EnvServer(factory, max_sessions=1) as server:
        remote = RemoteVectorEnv(server.address)
        remote.action_space.seed(SEED)  # EnvPool's own is that of one lane
        seed = None if name == "envpool" else SEED  # it is seeded when it is made
        assert_identical(remote.reset(seed=seed)[0], local.reset(seed=seed)[0])
        for step in range(NUM_STEPS):
            actions = remote.action_space.sample()
            ours, theirs = remote.step(actions), local.step(actions)
            try:
                assert_identical(ours[0], theirs[0])
                for mine, their in zip(ours[1:4], theirs[1:4], strict=True):
                    np.testing.assert_array_equal(mine, their)
            except AssertionError as error:
                return {"steps": step, "reason": " ".join(str(error).split())[:200]}
        remote.close()
    return {"steps": NUM_STEPS, "reason": ""}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(compare(sys.argv[1])) + "\n")
