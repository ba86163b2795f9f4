"""An RLModule as an ONNX graph: what it computes before an action is drawn, and how one is."""

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
from ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module import DefaultDQNTorchRLModule
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.torch.torch_distribution import (
    TorchCategorical,
    TorchDiagGaussian,
    TorchSquashedGaussian,
)
from ray.rllib.core.rl_module.rl_module import RLModule

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.fast_path.module_forward import is_switched_as_usual
from rlmesh_ray.models.onnx.onnx_export import OnnxGraph

OUTPUT = Columns.ACTION_DIST_INPUTS
"""The graph's output: what actions are drawn from."""
_DQN = DefaultDQNTorchRLModule
_KINDS: dict[type[Any], str] = {
    TorchCategorical: "categorical",
    TorchDiagGaussian: "diag_gaussian",
    TorchSquashedGaussian: "squashed_gaussian",
}


def is_epsilon_greedy(module: RLModule, *, explore: bool = True) -> bool:
    """Return whether a module chooses its actions as RLlib's DQN does, by its Q-values."""
    mode = "exploration" if explore else "inference"
    own = (f"_forward_{mode}", f"get_{mode}_action_dist_cls")
    return (
        isinstance(module, DefaultDQNTorchRLModule)
        and is_switched_as_usual(module)
        and all(getattr(type(module), each) is getattr(_DQN, each) for each in own)
    )


def distribution_of(module: RLModule, *, explore: bool = True) -> str:
    """Return what actions are drawn from, by its name in ``action_draws.KINDS``.

    Raises:
        ConfigurationError: It is none of these.
    """
    if is_epsilon_greedy(module, explore=explore):
        return "epsilon_greedy"
    kind = (
        module.get_exploration_action_dist_cls()
        if explore
        else module.get_inference_action_dist_cls()
    )
    if kind not in _KINDS:
        name = kind.__name__.removesuffix("'>Partial").rpartition(".")[2]  # as RLlib's partial ones
        raise ConfigurationError(
            f"actions of {name} can be drawn by torch only; use a module with one of "
            f"{', '.join(each.__name__ for each in _KINDS)}"
        )
    return _KINDS[kind]


def q_values(module: Any, obs: torch.Tensor) -> torch.Tensor:
    values: torch.Tensor = module.compute_q_values({Columns.OBS: obs.to(torch.float32)})["qf_preds"]
    return values


def distribution_inputs(module: Any, obs: torch.Tensor) -> torch.Tensor:
    batch = {Columns.OBS: obs.to(torch.float32)}
    if is_epsilon_greedy(module):
        return q_values(module, obs)  # its exploration draws, and gives actions only
    outputs = module.forward_exploration(batch)
    if OUTPUT not in outputs:
        raise ConfigurationError(f"{type(module).__name__} chooses its actions itself")
    inputs: torch.Tensor = outputs[OUTPUT]
    return inputs


def bare_forward(module: Any, *, explore: bool) -> Callable[[Any, Any], dict[str, Any]]:
    """Return what RLlib runs of a module, without the switching of modes around it.

    Returns:
        A function of the module, or a copy of it, and a batch. It raises ConfigurationError where
        the exploration depends on the number of steps.

    Raises:
        ConfigurationError: The module does something of its own around it.
    """
    if not is_switched_as_usual(module):
        raise ConfigurationError(
            f"{type(module).__name__} has a forward_exploration, forward_inference, train or eval "
            "of its own"
        )
    if explore:
        no_time = _NoTime(type(module).__name__)
        return lambda called, batch: dict(called._forward_exploration(batch, t=no_time))
    return lambda called, batch: dict(called._forward_inference(batch))


class _NoTime:
    """Stands for the number of steps of the training; each operation on it raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: object) -> NoReturn:
        raise ConfigurationError(f"the exploration of {self._name} depends on the number of steps")

    __lt__ = __le__ = __gt__ = __ge__ = __float__ = __int__ = __index__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse


def exported_module(module: Any, observation_space: Any, input_name: str) -> OnnxGraph:
    """Return a module's graph: observations as the space has them, (n, *shape), to ``OUTPUT``.

    Args:
        module: A TorchRLModule without a state.
        observation_space: A Box.
        input_name: What the graph calls its input.

    Raises:
        ConfigurationError: The module cannot be expressed, or the package onnx is missing.
    """
    shape = observation_space.shape or ()
    example = torch.as_tensor(np.zeros((2, *shape), observation_space.dtype))
    forward: Callable[..., Any] = lambda called, obs: (distribution_inputs(called, obs),)  # noqa: E731
    return OnnxGraph(module, forward, {input_name: example}, [OUTPUT])
