"""An RLModule's forward pass, in torch, compiled and as a graph, and how its actions are drawn."""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
import tree
from numpy.typing import NDArray
from ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module import DefaultDQNTorchRLModule
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.torch.torch_distribution import (
    TorchCategorical,
    TorchDiagGaussian,
    TorchSquashedGaussian,
)
from ray.rllib.core.rl_module.rl_module import RLModule

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.actions import BatchBuckets, PaddedBatch
from rlmesh_ray.models.onnx.action_draws import ActionDraws
from rlmesh_ray.models.onnx.compiled_forward import CompiledForward, InferenceChoice
from rlmesh_ray.models.onnx.onnx_export import OnnxGraph
from rlmesh_ray.models.rllib.fast_path import FastForward, batch_of, is_switched_as_usual, narrowed
from rlmesh_ray.models.torch.module import compiled, padded
from rlmesh_ray.options import require_inference

OUTPUT = Columns.ACTION_DIST_INPUTS
"""The graph's output: what actions are drawn from."""
_DQN = DefaultDQNTorchRLModule
_KINDS: dict[type[Any], str] = {
    TorchCategorical: "categorical",
    TorchDiagGaussian: "diag_gaussian",
    TorchSquashedGaussian: "squashed_gaussian",
}
_DRAWN = {Columns.ACTIONS, Columns.ACTION_LOGP}
_KEPT = {OUTPUT, Columns.STATE_OUT}

Forward = Callable[..., dict[str, Any]]
"""From a batch to outputs; to explore, also the environment steps so far as ``t``."""


class BucketedForward:
    """Runs an RLModule for inference or exploration, in batches of few sizes.

    Args:
        module: The RLModule, on its device, switched to evaluation mode; its parts must not be
            replaced.
        explore: Whether to run its exploration forward pass.
        buckets: Row counts that the module is run with.
        device: Its device.
        inference: See ``TorchPolicy``.

    Raises:
        ConfigurationError: There are more buckets than torch compiles.
    """

    def __init__(
        self,
        module: Any,
        explore: bool,
        buckets: BatchBuckets,
        device: torch.device,
        inference: str,
    ) -> None:
        require_inference(inference)
        module.eval()
        self._explore = explore
        self._buckets = buckets
        self.env_steps = 0
        """Environment steps of the training; some modules' exploration depends on it."""
        self._torch: Forward = FastForward(module, explore=explore)
        named: Forward = module.forward_exploration if explore else module.forward_inference
        if not explore and is_epsilon_greedy(module, explore=False):
            self._torch = named = partial(_logits, module)
        if inference == "compiled" and device.type != "cpu":
            self._torch = compiled(named, device, buckets)
        self.inference = InferenceChoice(
            inference,
            partial(CompiledForward, module, call=partial(forward_with_logits, explore=explore)),
            device=device.type,
        )
        """Whether the module runs in torch or compiled."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the module's outputs for a batch of tensors, without those of padding.

        Args:
            batch: Columns of tensors (nested), one batch dimension first.
        """
        if not self._buckets.sizes:
            return dict(self.inference.run(self._in_torch, batch))
        parts = self._buckets.parts(len(tree.flatten(batch)[0]))
        outputs = [
            _cut(self.inference.run(self._in_torch, _padded(batch, part)), part, len(parts))
            for part in parts
        ]
        if len(outputs) == 1:
            return outputs[0]
        joined: dict[str, Any] = tree.map_structure(lambda *of_parts: torch.cat(of_parts), *outputs)
        return joined

    def _in_torch(self, batch: dict[str, Any]) -> dict[str, Any]:
        return self._torch(batch, t=self.env_steps) if self._explore else self._torch(batch)


def _padded(batch: dict[str, Any], part: PaddedBatch) -> Any:
    return tree.map_structure(lambda column: padded(column[part.rows], part.size), batch)


def _cut(outputs: Any, part: PaddedBatch, num_parts: int) -> dict[str, Any]:
    def cut(column: torch.Tensor) -> torch.Tensor:
        # The next part may overwrite the output of this one.
        return column[: part.num_rows].clone() if num_parts > 1 else column[: part.num_rows]

    return {key: tree.map_structure(cut, column) for key, column in outputs.items()}


# --- what RLlib runs of a module -----------------------------------------------------------


def bare_forward(module: Any, batch: dict[str, Any], *, explore: bool) -> dict[str, Any]:
    """Run what RLlib runs of a module, or of a copy, without the switching of modes around it.

    Raises:
        ConfigurationError: The module does something of its own around it, or its exploration
            depends on the number of steps.
    """
    name = type(module).__name__
    if not is_switched_as_usual(module):
        raise ConfigurationError(
            f"{name} has a forward_exploration, forward_inference, train or eval of its own"
        )
    if explore:
        return dict(module._forward_exploration(batch, t=_NoTime(name)))
    return dict(module._forward_inference(batch))


class _NoTime:
    """Stands for the number of steps of the training; each operation on it raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_: object) -> NoReturn:
        raise ConfigurationError(f"the exploration of {self._name} depends on the number of steps")

    __lt__ = __le__ = __gt__ = __ge__ = __float__ = __int__ = __index__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse


def forward_with_logits(module: Any, batch: dict[str, Any], *, explore: bool) -> dict[str, Any]:
    if not explore and is_epsilon_greedy(module, explore=False):
        return _logits(module, batch)
    return bare_forward(module, batch, explore=explore)


@torch.no_grad()
def _logits(module: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Return what DQN's inference chooses by, and does not return.

    It returns actions only, the best by its Q-values, so NaN in these would be lost. RLlib's
    connectors choose the same actions from logits.
    """
    outputs = dict(module.compute_q_values(batch))
    outputs[OUTPUT] = outputs.pop("qf_preds")
    return {key: outputs[key] for key in _KEPT & outputs.keys()}


# --- what actions are drawn from -----------------------------------------------------------


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


def distribution_inputs(module: Any, obs: torch.Tensor) -> torch.Tensor:
    """Return what a module's exploration draws actions from, for observations (n, *shape).

    Raises:
        ConfigurationError: It chooses its actions itself.
    """
    batch = {Columns.OBS: obs.to(torch.float32)}
    if is_epsilon_greedy(module):
        outputs = _logits(module, batch)  # its exploration draws, and gives actions only
    else:
        outputs = module.forward_exploration(batch)
    if OUTPUT not in outputs:
        raise ConfigurationError(f"{type(module).__name__} chooses its actions itself")
    inputs: torch.Tensor = outputs[OUTPUT]
    return inputs


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


class CompiledModule(CompiledForward):
    """Does what the forward pass of a module without a state and RLlib's sampling of actions do.

    Args:
        module: A TorchRLModule without a state.
        rows: An example of observations, one or more.
        t: Environment steps of the training then.
        explore: Whether it explores.
        seed: Of the generator that actions are drawn from; None: a random one.

    Raises:
        ConfigurationError: It cannot be compiled; the message has the reason.
        MissingPackageError: onnx or onnxruntime is missing.
    """

    def __init__(
        self, module: Any, rows: NDArray[Any], t: int = 0, *, explore: bool, seed: int | None
    ) -> None:
        self._explore = explore
        example = batch_of(rows[:1].copy(), None)
        self._dtype = example[Columns.OBS].numpy().dtype
        self._draws = ActionDraws(distribution_of(module, explore=explore), seed)
        is_greedy = is_epsilon_greedy(module, explore=explore)
        self._schedule = module.epsilon_schedule if is_greedy else None
        call = _logits if is_greedy else partial(_undrawn, explore=explore)
        super().__init__(module, example, call=call)
        self._names = list(self.nesting_out)

    def run(self, *batch: Any) -> dict[str, NDArray[Any]] | None:
        """Return the module's outputs with actions, as ``as_arrays`` makes them.

        Args:
            batch: Observations, and the environment steps of the training, on which exploration may
                depend.

        Returns:
            None: there are numbers among the outputs from which no action can be drawn, or
            ``CompiledForward`` leaves it to torch.
        """
        rows, t = batch
        outputs = self.arrays(rows if rows.dtype == self._dtype else rows.astype(self._dtype))
        if outputs is None:
            return None
        arrays = dict(zip(self._names, outputs, strict=True))
        inputs = arrays[OUTPUT]
        if self._schedule is not None:  # DQN's: it chooses its actions itself
            del arrays[OUTPUT]
            if self._explore:
                self._draws.epsilon = float(self._schedule.update(t))
        arrays[Columns.ACTIONS], logp = self._draws.draw(inputs, explore=self._explore)
        if logp is not None:
            if self._explore and not np.isfinite(logp.sum()):
                return None
            arrays[Columns.ACTION_LOGP] = logp
        return {name: narrowed(array) for name, array in arrays.items()}


def _undrawn(module: Any, batch: dict[str, Any], *, explore: bool) -> dict[str, Any]:
    name, found = type(module).__name__, bare_forward(module, batch, explore=explore)
    if OUTPUT not in found or _DRAWN & found.keys():
        raise ConfigurationError(f"{name} chooses its actions itself")
    others = [key for key, value in found.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ConfigurationError(f"{name} has {others} among its outputs, which are no tensors")
    return found
