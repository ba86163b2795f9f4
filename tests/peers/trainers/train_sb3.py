"""Stable-Baselines3 on an endpoint: prints one line of JSON.

``python -m tests.peers.trainers.train_sb3 TASK ARGUMENTS``, with JSON arguments, does one of
``TASKS`` and prints what it returns. It needs the packages of requirements.txt.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

from rlmesh_ray import DmEnvRpcSettings
from rlmesh_ray.errors import RlmeshError
from rlmesh_ray.sb3 import RemoteVecEnv


def steps(address: str, num_envs: int, env_id: str, num_steps: int) -> list[Any]:
    """Run the same actions on an endpoint and in a DummyVecEnv; return both sides' rows."""
    local = DummyVecEnv([lambda: gymnasium.make(env_id)] * num_envs)
    is_dm_env_rpc = address.startswith("dm_env_rpc:")
    settings = DmEnvRpcSettings(num_envs=num_envs) if is_dm_env_rpc else None
    sides = [RemoteVecEnv(address, dm_env_rpc=settings), local]
    local.action_space.seed(0)
    actions = np.array(
        [[local.action_space.sample() for _ in range(num_envs)] for _ in range(num_steps)]
    )
    return [_rows(env, actions) for env in sides]


def _rows(env: Any, actions: Any) -> list[Any]:
    env.seed(7)
    rows = [[str(env.observation_space), str(env.action_space)]]
    rows.append(_plain([env.reset(), env.reset_infos]))
    rows += [_plain([*env.step(action), env.reset_infos]) for action in actions]
    env.close()
    return rows


def _plain(value: Any) -> Any:
    """Return ``value`` for JSON, with the dtypes of its arrays."""
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {key: _plain(own) for key, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(own) for own in value]
    return value


def train(address: str) -> dict[str, Any]:
    """Train PPO for 2,000 steps; return how many episodes it saw, and evaluate the policy."""
    env = VecMonitor(RemoteVecEnv(address))
    model = PPO("MlpPolicy", env, n_steps=250, seed=0, device="cpu")
    model.learn(total_timesteps=2000)
    returns, _ = evaluate_policy(model, env, n_eval_episodes=5, return_episode_rewards=True)
    env.close()
    return {
        "steps": model.num_timesteps,
        "episodes": len(model.ep_info_buffer),
        "returns": [float(one) for one in returns],
    }


def calls(address: str) -> dict[str, Any]:
    """Reach into the lanes as SB3's callbacks and wrappers do."""
    env = RemoteVecEnv(address)
    early = _refusal(env.render)
    env.set_options([{"task": lane} for lane in range(env.num_envs)])
    seen: dict[str, Any] = {"reset": env.reset().tolist()}
    seen["render_mode"] = env.get_attr("render_mode")
    env.set_attr("task", 7, indices=[0, -1])
    seen["get_attr"] = env.get_attr("task")
    seen["subset"] = env.env_method("plus", 3, indices=1)
    seen["none"] = env.env_method("plus", 3, indices=[])
    seen["has_attr"] = [env.has_attr(name) for name in ("render_mode", "task", "missing")]
    seen["is_wrapped"] = env.env_is_wrapped(gymnasium.Wrapper)
    seen["images"] = [np.asarray(image).tolist() for image in env.get_images()]
    seen["picture"] = list(env.render().shape)
    seen["refused"] = [
        early,
        _refusal(lambda: env.has_attr("plus")),
        _refusal(lambda: env.get_attr("secret")),
        _refusal(lambda: env.env_method("plus", more=3)),
        _refusal(lambda: RemoteVecEnv(env.env, token="t")),
    ]
    env.close()
    return seen


def finds(address: str) -> list[bool]:
    """Return which attributes the lanes have."""
    env = RemoteVecEnv(address)
    found = [env.has_attr(name) for name in ("task", "plus", "missing")]
    env.close()
    return found


def _refusal(ask: Callable[[], object]) -> str:
    try:
        ask()
    except RlmeshError as error:
        return str(error)
    return ""


TASKS: dict[str, Callable[..., Any]] = {
    "steps": steps,
    "train": train,
    "calls": calls,
    "finds": finds,
}

if __name__ == "__main__":
    outcome = TASKS[sys.argv[1]](**json.loads(sys.argv[2]))
    sys.stdout.write(json.dumps(outcome) + "\n")
