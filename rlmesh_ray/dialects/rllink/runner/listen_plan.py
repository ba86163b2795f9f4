"""How the runners of one algorithm listen for simulators, what they take and what they tell."""

import math
import pickle
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium
import numpy as np
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rlmesh_ray.auth.server_tls import TlsSource
from rlmesh_ray.auth.token_file import ServerToken
from rlmesh_ray.dialects.rllink import wire as m
from rlmesh_ray.dialects.rllink.server.connection import RLlinkLimits
from rlmesh_ray.errors import ConfigurationError, ConformanceError
from rlmesh_ray.models.rllib.forward import OUTPUT, distribution_of, is_epsilon_greedy
from rlmesh_ray.spaces.batch import coerce
from rlmesh_ray.spaces.spec import BoxSpec, Leaf

RLLINK_KEY = "rlmesh_ray_rllink"
"""Where the plan stands in ``config.env_config``."""


@dataclass(frozen=True, slots=True)
class RLlinkPlan:
    """Where runners listen, and what they take."""

    host: str
    port: int
    """Of the local runner; runner ``i`` listens on the i-th after it. 0: free ones."""
    token: ServerToken = field(default=None, repr=False)  # Tune writes configs into its logs
    limits: RLlinkLimits = field(default_factory=RLlinkLimits)
    max_weights_lag: int | None = 0
    """How many versions old the weights may be that have acted; None: any."""
    env_steps_per_sample: int | None = None
    """What one message of a client is to bring; None: a rollout fragment."""
    wait_s: float = 30.0
    """How long ``sample`` waits for steps at most."""
    max_waiting_steps: int | None = 1000
    """Off-policy: limit of the steps in the queue; clients wait beyond it."""
    max_waiting_bytes: int = 2**30
    """Limit of the bytes in the queue."""
    sends_pickled_config: bool = False
    model_input: str = "obs"
    """What the ONNX model calls its input."""
    tls: TlsSource | None = None
    """With which files runners speak TLS, of the nodes that they are on."""
    no_token: bool = False
    """Of checkpoints of 0.1.0a1: ``token`` is False."""

    @property
    def is_on_policy(self) -> bool:
        return self.max_weights_lag == 0

    def port_of(self, worker_index: int, *, num_training: int, in_evaluation: bool) -> int:
        """Return where a runner listens.

        Args:
            worker_index: As RLlib counts: remote runners from 1, the local one is 0.
            num_training: How many remote runners train; those that evaluate come after them.
            in_evaluation: Whether it is an evaluation runner.
        """
        place = worker_index + (num_training + 1 if in_evaluation else 0)
        return self.port and self.port + place


class SampleSpaces:
    """Checks and casts what simulators send: nothing else reaches the learner.

    Args:
        observation: A Box.
        action: A Box, or a Discrete that starts at 0.

    Raises:
        ConfigurationError: They are others.
    """

    def __init__(
        self, observation: gymnasium.Space[Any] | None, action: gymnasium.Space[Any] | None
    ) -> None:
        if not isinstance(observation, gymnasium.spaces.Box):
            raise ConfigurationError(
                f"observations of {observation} cannot come over RLlink: give a Box as "
                "observation_space, and have simulators flatten what they see"
            )
        shape: tuple[int, ...] = ()
        if isinstance(action, gymnasium.spaces.Discrete) and action.start == 0:
            self._num_choices = input_width = int(action.n)
        elif isinstance(action, gymnasium.spaces.Box):
            # RLlib's modules and learners do not support a Box of shape ().
            self._num_choices, shape = 0, action.shape or (1,)
            input_width = 2 * math.prod(action.shape)
        else:
            raise ConfigurationError(
                f"actions of {action} cannot come over RLlink: give a Box, or a Discrete that "
                "starts at 0, as action_space"
            )
        self.observation = observation
        self.action: gymnasium.Space[Any] = action
        self._leaves = {
            "obs": _leaf("obs", observation.shape, observation.dtype),
            "actions": _leaf("actions", shape, action.dtype),
            # Learners hold them in 32 bits.
            "reward": _leaf("reward", (), np.float32),
            m.ACTION_DIST_INPUTS: _leaf(m.ACTION_DIST_INPUTS, (input_width,), np.float32),
            m.ACTION_LOGP: _leaf(m.ACTION_LOGP, (), np.float32),
        }

    def conformed(self, chunk: m.Chunk) -> m.Chunk:
        """Return a chunk with the dtypes of the spaces.

        Raises:
            ConformanceError: It does not fit them.
        """
        num_steps, actions = len(chunk), chunk.actions
        if actions.shape == (num_steps, *(self.action.shape or ())):
            actions = actions.reshape(num_steps, *self._leaves["actions"].shape)
        actions = self.cast("actions", actions, num_steps)
        if self._num_choices and not ((actions >= 0) & (actions < self._num_choices)).all():
            reason = f"there is one that is not from 0 to {self._num_choices - 1}"
            raise ConformanceError("range", "actions", reason)
        self.cast("reward", chunk.rewards, num_steps)
        has_all = len(chunk.model_outputs) == len(m.MODEL_OUTPUTS)
        outputs = chunk.model_outputs.items() if has_all else ()
        return replace(
            chunk,
            obs=self.cast("obs", chunk.obs, num_steps + 1),
            actions=actions,
            model_outputs={name: self.cast(name, each, num_steps) for name, each in outputs},
        )

    def cast(self, name: str, values: Any, num: int | None = None) -> m.Array:
        """Return finite values, ``(num, *shape)`` or one of them, with the dtype for the name.

        Raises:
            ConformanceError: They do not fit, or are beyond the dtype.
        """
        cast: m.Array = coerce(self._leaves[name], values, num)
        if not np.isfinite(cast).all():
            raise ConformanceError("range", name, f"there is a value that is no {cast.dtype}")
        return cast


def _leaf(name: str, shape: tuple[int, ...], dtype: Any) -> Leaf:
    return Leaf((name,), BoxSpec(shape, np.dtype(dtype).name, b"", b""), shape, np.dtype(dtype))


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
