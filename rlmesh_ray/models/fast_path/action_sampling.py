"""Sampling of actions from a module's output, with the results of RLlib's GetActions.

RLlib's distributions, and torch's below them, cost more than drawing the numbers. For the two that
RLlib's default modules use, the same operations are done here on the same tensors in the same
order: so the results are the same, and so is the generator's state. Other distributions are left to
RLlib.
"""

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.torch.torch_distribution import TorchCategorical, TorchDiagGaussian
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.utils.numpy import convert_to_numpy

SampledActions = torch.Tensor | NDArray[Any]
Draw = Callable[[torch.Tensor], tuple[SampledActions, SampledActions]]
"""From a distribution's inputs, one row for each lane, to actions and their log probabilities."""

_LOG_SQRT_TAU = math.log(math.sqrt(2 * math.pi))
_ALSO_NUMPYS = (torch.float32, torch.float64)
_KIND_OF_DISTRIBUTION = ("get_exploration_action_dist_cls", "get_inference_action_dist_cls")
_OF_ROWS = (torch.Tensor, np.ndarray)
_NARROWED = {
    np.dtype(np.float16): np.dtype(np.float32),
    np.dtype(np.float64): np.dtype(np.float32),
    np.dtype(np.int64): np.dtype(np.int32),
}


class ActionSampler:
    """Adds actions to a module's output.

    Args:
        module: A TorchRLModule.
        get_actions: The method of RLlib's connector, for other distributions.
    """

    def __init__(
        self, module: Any, get_actions: Callable[[dict[str, Any], Any, bool], None]
    ) -> None:
        self._module = module
        self._get_actions = get_actions
        # Overridden methods are called by RLlib, as often as RLlib does.
        self._has_usual_kinds = all(
            getattr(type(module), name) is getattr(TorchRLModule, name) and name not in vars(module)
            for name in _KIND_OF_DISTRIBUTION
        )

    def add_to(self, output: dict[str, Any], *, explore: bool) -> None:
        """Add actions, and their log probabilities, unless the module's output has them."""
        draw = self._draw(output, explore)
        if draw is None:
            self._get_actions(output, self._module, explore)
            return
        output[Columns.ACTIONS], output[Columns.ACTION_LOGP] = draw(
            output[Columns.ACTION_DIST_INPUTS].detach()
        )

    def _draw(self, output: dict[str, Any], explore: bool) -> Draw | None:
        inputs = output.get(Columns.ACTION_DIST_INPUTS)
        if (
            not self._has_usual_kinds
            or type(inputs) is not torch.Tensor
            or inputs.dim() != 2
            or Columns.ACTIONS in output
            or Columns.ACTION_LOGP in output
        ):
            return None
        if explore:
            return _DRAWS.get(self._module.get_exploration_action_dist_cls())
        return _LIKELIEST.get(self._module.get_inference_action_dist_cls())


def _categorical(logits: torch.Tensor) -> tuple[SampledActions, SampledActions]:
    if logits.is_cpu and logits.dtype in _ALSO_NUMPYS and _is_done_alike():
        normalized = _normalized(logits)
        chosen = _drawn(torch.softmax(normalized, dim=-1))
        logp = normalized.numpy()[_rows(len(chosen)), chosen]
        # Else there were other numbers than finite ones and -inf: torch handles them below.
        if math.isfinite(logp.dot(logp)):
            return chosen, logp
    normalized = logits - logits.logsumexp(dim=-1, keepdim=True)
    actions = torch.multinomial(torch.softmax(normalized, dim=-1), 1, True)
    return actions.squeeze(-1), normalized.gather(-1, actions).squeeze(-1)


def _normalized(logits: torch.Tensor) -> torch.Tensor:
    """Subtract the logarithm of the sum of exponentials; NaN where a row's largest is infinite.

    ``torch.logsumexp`` does the same after a check for infinite numbers, which takes as long for so
    few numbers.
    """
    largest = logits.amax(dim=-1, keepdim=True)
    total = (logits - largest).exp_().sum(dim=-1, keepdim=True)
    return logits - total.log_().add_(largest)


def _drawn(
    probabilities: torch.Tensor, generator: torch.Generator | None = None
) -> NDArray[np.int64]:
    """Draw an index for each row as torch.multinomial does, without its check of each number.

    NumPy does the operations with results that are the same to the last bit: for so few numbers in
    half the time.
    """
    times = torch.empty_like(probabilities).exponential_(1, generator=generator).numpy()
    indices: NDArray[np.int64] = np.divide(probabilities.numpy(), times, out=times).argmax(axis=1)
    return indices


@lru_cache(maxsize=16)
def _rows(count: int) -> NDArray[np.int64]:
    return np.arange(count)


@cache
def _is_done_alike() -> bool:
    """Return whether this version of torch draws the same, and as often from its generator."""
    # The dtype and device are given, since a program may change torch's defaults.
    logits = torch.linspace(-3.0, 3.0, 96, dtype=torch.float32, device="cpu").reshape(32, 3)
    if not torch.equal(_normalized(logits), logits - logits.logsumexp(dim=-1, keepdim=True)):
        return False
    probabilities = torch.softmax(logits, dim=-1)
    own, torchs = (torch.Generator("cpu").manual_seed(7) for _ in range(2))
    expected = torch.multinomial(probabilities, 1, True, generator=torchs).squeeze(-1).numpy()
    return np.array_equal(_drawn(probabilities, own), expected) and torch.equal(
        own.get_state(), torchs.get_state()
    )


def _diagonal_gaussian(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw as RLlib's TorchDiagGaussian, which is torch's Normal, summed over the last axis."""
    mean, log_deviation = inputs.chunk(2, dim=-1)
    deviation = log_deviation.exp()
    actions = torch.normal(mean, deviation)
    logp = -((actions - mean) ** 2) / (2 * deviation**2) - deviation.log() - _LOG_SQRT_TAU
    return actions, logp.sum(-1)


_DRAWS: dict[type[Any], Draw] = {
    TorchCategorical: _categorical,
    TorchDiagGaussian: _diagonal_gaussian,
}


def _likeliest_choice(logits: torch.Tensor) -> tuple[SampledActions, SampledActions]:
    """Choose as RLlib's TorchDeterministic of the largest logit, whose log probability is zero."""
    actions = logits.argmax(dim=-1)
    return actions, torch.zeros_like(actions)


def _mean(inputs: torch.Tensor) -> tuple[SampledActions, SampledActions]:
    """Choose as RLlib's TorchDeterministic of a Gaussian's mean; the zeros have its shape."""
    mean, log_deviation = inputs.chunk(2, dim=-1)
    if mean.shape != log_deviation.shape:
        _ = mean + log_deviation  # raises if they do not fit, as RLlib's distribution does
    return mean, torch.zeros_like(mean)


_LIKELIEST: dict[type[Any], Draw] = {
    TorchCategorical: _likeliest_choice,
    TorchDiagGaussian: _mean,
}


def as_arrays(output: dict[str, Any]) -> dict[str, Any]:
    """Return a module's output as RLlib's TensorToNumpy does, with floats and integers of 32 bits.

    Arrays own their memory: a compiled module may write to the same tensors again.
    """
    if any(type(value) not in _OF_ROWS or not value.ndim for value in output.values()):
        arrays: dict[str, Any] = convert_to_numpy(output)
        return arrays
    return {name: _as_array(value) for name, value in output.items()}


def _as_array(value: SampledActions) -> NDArray[Any]:
    array = value if isinstance(value, np.ndarray) else value.detach().cpu().numpy()
    return narrowed(array)


def narrowed(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy, of 32 bits where RLlib stores such."""
    return array.astype(_NARROWED.get(array.dtype, array.dtype))
