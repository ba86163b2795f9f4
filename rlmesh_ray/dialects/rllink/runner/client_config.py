"""What clients are told: how to sample, and how to turn a model's output into actions."""

import pickle
from typing import Any

import gymnasium
import numpy as np
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rlmesh_ray.dialects.rllink.runner.listen_plan import RLLINK_KEY, RLlinkPlan
from rlmesh_ray.dialects.rllink.runner.sample_validation import SampleSpaces
from rlmesh_ray.dialects.rllink.wire import messages as m
from rlmesh_ray.models.rllib.exported_module import OUTPUT, distribution_of, is_epsilon_greedy


def client_config(
    config: AlgorithmConfig, plan: RLlinkPlan, spaces: SampleSpaces, module: Any, num_steps: int
) -> m.SetConfig:
    """Return the answer to GET_CONFIG, for clients of either dialect.

    Args:
        config: The runner's.
        plan: Its own part of it.
        spaces: Of samples.
        module: What acts.
        num_steps: What a message is to bring.
    """
    return m.SetConfig(
        num_steps,
        plan.is_on_policy,
        {
            "explore": bool(config.explore),
            "observation_space": _described(spaces.observation),
            "action_space": _described(spaces.action),
            "action_distribution": distribution_of(module),
            "normalize_actions": bool(config.normalize_actions),
            "clip_actions": bool(config.clip_actions),
            "model_input": plan.model_input,
            "model_output": OUTPUT,
        },
        _pickled(config, num_steps) if plan.sends_pickled_config else b"",
    )


def weights_extras(module: Any, num_env_steps: int) -> m.Extras:
    """Return what changes with training beside the weights: how much is left to chance."""
    if not is_epsilon_greedy(module):
        return {}
    module.epsilon_schedule.update(num_env_steps)
    return {"epsilon": float(module.epsilon_schedule.get_current_value())}


def _described(space: gymnasium.Space[Any]) -> dict[str, Any]:
    if isinstance(space, gymnasium.spaces.Discrete):
        return {"kind": "discrete", "n": int(space.n), "dtype": str(space.dtype)}
    assert isinstance(space, gymnasium.spaces.Box)
    return {
        "kind": "box",
        "shape": list(space.shape),
        "dtype": str(space.dtype),
        "low": _bounds(space.low),
        "high": _bounds(space.high),
    }


def _bounds(values: Any) -> Any:
    """Return one number where all are alike; None stands for no bound, since JSON has none."""
    distinct = np.unique(values)
    if len(distinct) == 1:
        return float(distinct[0]) if np.isfinite(distinct[0]) else None
    return [float(each) if np.isfinite(each) else None for each in np.ravel(values)]


def _pickled(config: AlgorithmConfig, num_steps: int) -> bytes:
    """Return the config as Ray's clients execute it, without what is ours or secret."""
    own = config.copy(copy_frozen=False)
    own.env_config = {name: part for name, part in own.env_config.items() if name != RLLINK_KEY}
    own.env_runners(env_runner_cls=None, rollout_fragment_length=num_steps)
    return pickle.dumps(own)
