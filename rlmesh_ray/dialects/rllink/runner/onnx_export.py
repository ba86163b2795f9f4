"""A module as an ONNX model, for simulators that have neither RLlib nor torch.

The graph is made once; for other weights only its numbers are replaced, which takes milliseconds.
It takes observations as the space has them, (n, *shape), and gives what actions are drawn from.
"""

import copy
import functools
import io
import warnings
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module import DefaultDQNTorchRLModule
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.torch.torch_distribution import (
    TorchCategorical,
    TorchDiagGaussian,
    TorchSquashedGaussian,
)
from ray.rllib.core.rl_module.rl_module import RLModule
from torch import nn

from rlmesh_ray.errors import ConfigurationError, MissingPackageError

OUTPUT = "action_dist_inputs"
_OPSET = 17
_PREFIX = "module."
_KINDS: dict[type[Any], str] = {
    TorchCategorical: "categorical",
    TorchDiagGaussian: "diag_gaussian",
    TorchSquashedGaussian: "squashed_gaussian",
}


def distribution_of(module: RLModule) -> str:
    """Return what actions are drawn from, as clients are told.

    ``categorical``: logits. ``diag_gaussian``: means, then logarithms of standard deviations.
    ``squashed_gaussian``: the same, and a tanh over what is drawn. ``epsilon_greedy``: values, of
    which the highest wins unless chance decides otherwise.

    Raises:
        ConfigurationError: It is none of these.
    """
    if isinstance(module, DefaultDQNTorchRLModule):
        return "epsilon_greedy"
    kind = module.get_exploration_action_dist_cls()
    if kind not in _KINDS:
        raise ConfigurationError(
            f"simulators cannot be told how to draw actions from {kind.__name__}; use a module "
            f"with one of {', '.join(each.__name__ for each in _KINDS)}"
        )
    return _KINDS[kind]


class OnnxModel:
    """A module's graph, to be filled with weights.

    Args:
        module: A TorchRLModule without a state.
        observation_space: A Box.
        input_name: What the graph calls its input.

    Raises:
        ConfigurationError: The module cannot be expressed, or the package onnx is missing.
    """

    def __init__(
        self, module: RLModule, observation_space: gymnasium.Space[Any], input_name: str
    ) -> None:
        try:
            import onnx
        except ImportError as error:
            raise MissingPackageError(
                "models for simulators need: pip install 'rlmesh-ray[onnx]'"
            ) from error
        _know_nanmean()
        shape = observation_space.shape or ()
        inputs = torch.as_tensor(np.zeros((2, *shape), observation_space.dtype))
        made: Any = io.BytesIO()
        try:
            with warnings.catch_warnings(), torch.no_grad():
                # The newer exporter takes seconds and another package, for the same graph.
                warnings.simplefilter("ignore")
                torch.onnx.export(
                    _Forward(_with_distinct_weights(module)),
                    (inputs,),
                    made,
                    dynamo=False,
                    opset_version=_OPSET,
                    do_constant_folding=False,  # else weights would lose their names
                    input_names=[input_name],
                    output_names=[OUTPUT],
                    dynamic_axes={input_name: {0: "n"}, OUTPUT: {0: "n"}},
                )
        except Exception as error:  # a module's own code may raise anything
            raise ConfigurationError(
                f"{type(module).__name__} cannot be written as ONNX: "
                f"{(str(error).splitlines() or [''])[0]}"
            ) from error
        self._model = onnx.load_model_from_string(made.getvalue())

    def filled(self, weights: Mapping[str, NDArray[Any]]) -> bytes:
        """Return the model with other weights: a module's state."""
        from onnx import numpy_helper

        for place in self._model.graph.initializer:
            values = weights.get(place.name.removeprefix(_PREFIX))
            if values is not None:
                place.CopyFrom(numpy_helper.from_array(np.asarray(values), place.name))
        serialized: bytes = self._model.SerializeToString()
        return serialized


def _with_distinct_weights(module: Any) -> Any:
    """Return a copy without equal weights: torch would merge two biases of zeros into one."""
    copied = copy.deepcopy(module)
    for parameter in copied.parameters():
        nn.init.uniform_(parameter)
    return copied


class _Forward(nn.Module):
    """What a module does with observations before anything is drawn."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return distribution_inputs(self.module, obs)


def distribution_inputs(module: Any, obs: torch.Tensor) -> torch.Tensor:
    """Return what actions are drawn from, for observations as the space has them."""
    batch = {Columns.OBS: obs.to(torch.float32)}
    if isinstance(module, DefaultDQNTorchRLModule):
        # Its exploration draws, and gives actions only.
        values: torch.Tensor = module.compute_q_values(batch)["qf_preds"]
        return values
    inputs: torch.Tensor = module.forward_exploration(batch)[Columns.ACTION_DIST_INPUTS]
    return inputs


@functools.cache
def _know_nanmean() -> None:
    """Teach torch's exporter what a dueling head does; the same as a mean where nothing is NaN."""
    from torch.onnx import symbolic_helper

    def nanmean(graph: Any, values: Any, axes: Any, keep: Any, _dtype: Any) -> Any:
        return graph.op("ReduceMean", values, axes_i=axes, keepdims_i=keep)

    onnx: Any = torch.onnx
    parse = symbolic_helper.parse_args("v", "is", "i", "none")
    onnx.register_custom_op_symbolic("aten::nanmean", parse(nanmean), 9)
