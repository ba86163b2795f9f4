"""Ray's own example of a client, as it is in the wheel: CartPole, for ever. Takes the port.

It draws from generators without a seed; here they are, so that what is learned from it is
the same each time.
"""

import sys
from typing import Any

import gymnasium
import numpy as np
from ray.rllib.examples.envs.classes.utils.dummy_external_client import _dummy_external_client

_SEED = 1
_make = gymnasium.make


def _make_seeded(env_id: str) -> gymnasium.Env[Any, Any]:
    env = _make(env_id)
    env.reset(seed=_SEED)
    return env


gymnasium.make = _make_seeded  # type: ignore[assignment]  # the client names an id and no more
np.random.seed(_SEED)  # whose generator the client uses
_dummy_external_client(int(sys.argv[1]))
