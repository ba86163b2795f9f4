"""An RLModule without a state, compiled: rows of observations in, actions out, as arrays."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from ray.rllib.core.columns import Columns

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.fast_path.action_sampling import narrowed
from rlmesh_ray.models.fast_path.module_forward import batch_of
from rlmesh_ray.models.onnx.action_draws import ActionDraws
from rlmesh_ray.models.onnx.compiled_forward import CompiledForward
from rlmesh_ray.models.rllib.exported_module import (
    OUTPUT,
    bare_forward,
    distribution_of,
    is_epsilon_greedy,
    q_values,
)

Outputs = Callable[[Any, torch.Tensor], dict[str, torch.Tensor]]
"""Runs a module on rows; returns its outputs by name."""

_DRAWN = {Columns.ACTIONS, Columns.ACTION_LOGP}


class CompiledModule:
    """Does what a module's forward pass and RLlib's sampling of actions do.

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
        if any(each.device.type != "cpu" for each in module.parameters()):
            raise ConfigurationError("the module is not on the CPU")
        self._module, self._explore = module, explore
        example = batch_of(np.concatenate([rows[:1], rows[:1]]), None)[Columns.OBS]
        self._dtype = example.numpy().dtype
        self._draws = ActionDraws(distribution_of(module, explore=explore), seed)
        is_greedy = is_epsilon_greedy(module, explore=explore)
        self._schedule = module.epsilon_schedule if is_greedy else None
        was_training = module.training
        module.eval()
        try:
            outputs = _outputs_of(module, explore)
            self._names = _names_of(outputs, copy.deepcopy(module), example)
            self._forward = CompiledForward(module, example, call=outputs)
        finally:
            module.train(was_training)

    def load(self) -> None:
        self._forward.load()

    def _as_input(self, rows: NDArray[Any]) -> NDArray[Any]:
        return rows if rows.dtype == self._dtype else rows.astype(self._dtype)

    def run(self, rows: NDArray[Any], t: int) -> dict[str, NDArray[Any]] | None:
        """Return the module's outputs with actions, as ``as_arrays`` makes them.

        Args:
            rows: Observations.
            t: Environment steps of the training; exploration may depend on them.

        Returns:
            None: there are numbers among the outputs from which no action can be drawn, or
            ``CompiledForward`` leaves it to torch.
        """
        outputs = self._forward.arrays(self._as_input(rows))
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


def _names_of(outputs: Outputs, module: Any, rows: torch.Tensor) -> list[str]:
    try:
        with torch.no_grad():
            return list(outputs(module, rows))
    except ConfigurationError:
        raise
    except Exception as error:  # a module's own code may raise anything
        raise ConfigurationError(
            f"{type(module).__name__} cannot be run by itself, perhaps since its exploration "
            f"depends on the number of steps: {type(error).__name__}: {error}"
        ) from error


def _outputs_of(module: Any, explore: bool) -> Outputs:
    """Return what runs a module, and returns its outputs by name.

    Raises:
        ConfigurationError: Later, by what is returned: the outputs are not what actions are drawn
            from.
    """
    if is_epsilon_greedy(module, explore=explore):
        return lambda called, rows: {OUTPUT: q_values(called, rows)}
    name, forward = type(module).__name__, bare_forward(module, explore=explore)

    def run(called: Any, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        found = forward(called, {Columns.OBS: rows})
        if OUTPUT not in found or _DRAWN & found.keys():
            raise ConfigurationError(f"{name} chooses its actions itself")
        for key, value in found.items():
            if not isinstance(value, torch.Tensor):
                raise ConfigurationError(f"{name} has {key} among its outputs, which is no tensor")
        return dict(found)

    return run
