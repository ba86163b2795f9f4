"""TorchRL on an endpoint: prints one line of JSON.

``python -m tests.peers.trainers.train_torchrl ARGUMENTS``, with JSON arguments, runs the same
policy on the endpoint and on gymnasium's own environment, and prints what both gave. It needs the
packages of requirements.txt.
"""

import json
import sys
from typing import Any

import gymnasium
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torchrl.envs import GymWrapper, check_env_specs

from rlmesh_ray import RemoteEnv, RemoteVectorEnv

COLUMNS = ("observation", "action", ("next", "observation"), ("next", "reward"), ("next", "done"))


def episodes(env: Any, num_steps: int) -> list[Any]:
    """Return the columns of a rollout with random actions, over the ends of episodes."""
    check_env_specs(env)
    env.set_seed(3)
    torch.manual_seed(0)
    rollout = env.rollout(num_steps, break_when_any_done=False)
    env.close()
    # In place of what TorchRL does not know, such as what an ended lane observes next, it has NaN.
    columns = [rollout[column] for column in COLUMNS]
    return [[str(column.dtype), column.nan_to_num().tolist()] for column in columns]


def main(address: str, num_envs: int, env_id: str, mode: str, num_steps: int) -> list[Any]:
    """Return what both sides gave."""
    remote: Any = RemoteEnv(address) if num_envs == 1 else RemoteVectorEnv(address)
    local: Any = gymnasium.make(env_id)
    if num_envs > 1:
        local = SyncVectorEnv(
            [lambda: gymnasium.make(env_id)] * num_envs, autoreset_mode=AutoresetMode(mode)
        )
    return [episodes(GymWrapper(env), num_steps) for env in (remote, local)]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(**json.loads(sys.argv[1]))) + "\n")
