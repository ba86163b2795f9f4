"""A policy that is a torch module, a TorchScript module or a torch.export program."""

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlmesh_ray.errors import ConformanceError, ContractMismatchError, PolicyError
from rlmesh_ray.models.policy import Rows
from rlmesh_ray.spaces.batch import Leaf, empty_columns, flatten, leaves, unflatten
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.spec import BoxSpec, DiscreteSpec


class TorchPolicy:
    """Runs a module on batches of observations, greedily.

    The module gets the observations as tensors of their declared dtypes, one batch dimension
    first, in the structure of the observation space (a tensor, a dict of them, a tuple of them).
    For every leaf of the action space it returns, for N rows,

    * Discrete: logits ``(N, n)`` of a float dtype, of which the largest wins (plus ``start``),
      or the actions themselves, ``(N,)`` integers;
    * everything else: the actions themselves, ``(N, *shape)``; of an integer (or bool) dtype
      unless the leaf is a Box.

    Args:
        module: It is switched to evaluation mode and called where its parameters are.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        # A program from torch.export was traced in one mode and cannot switch.
        with contextlib.suppress(NotImplementedError):
            module.eval()
        self._module = module
        first = next(iter([*module.parameters(), *module.buffers()]), None)
        self._device = torch.device("cpu") if first is None else first.device

    def check_contract(self, contract: EnvContract) -> None:
        """Run the module once, on zeros of one lane.

        Raises:
            ContractMismatchError: The module does not take the contract's observations, or its
                output is nothing that the action space could take.
        """
        for leaf in (*leaves(contract.observation_space), *leaves(contract.action_space)):
            if leaf.dtype is None:
                raise ContractMismatchError(
                    f"a torch module cannot act in {contract.id}: {leaf.name or 'its space'} is "
                    "text; serve a Python callable instead"
                )
        spec = contract.observation_space
        try:
            outputs = self._outputs(contract, unflatten(spec, empty_columns(spec, 1)))
            self._actions(contract, outputs, 1)
        except PolicyError as error:
            raise ContractMismatchError(
                f"the torch module cannot act in {contract.id}: {error}"
            ) from error

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        """Choose the greedy actions, in one forward pass.

        Raises:
            PolicyError: The module raised, or its output is not what the class promises.
        """
        outputs = self._outputs(contract, rows.observations)
        for output in outputs:
            if output.is_floating_point() and bool(torch.isnan(output).any()):
                # argmax would make an action of it, and nobody would ever know.
                raise PolicyError("the module's output has NaN in it; are its weights sound?")
        return self._actions(contract, outputs, rows.num_rows)

    def forget(self, route_key: str, env_index: int | None) -> None:
        """Do nothing: a module is asked row by row and remembers nothing."""

    def _outputs(self, contract: EnvContract, observations: object) -> list[torch.Tensor]:
        """Run the module; one tensor for each leaf of the action space."""
        try:
            with torch.inference_mode():
                result = self._module(self._tensors(observations))
        except Exception as error:
            raise PolicyError(
                f"the module raised {type(error).__name__} on observations "
                f"{_describe(observations)}: {error}"
            ) from error
        try:
            outputs = flatten(contract.action_space, result)
        except ConformanceError as error:
            raise PolicyError(
                f"the module's output has not the structure of the action space: {error}"
            ) from error
        for output in outputs:
            if not isinstance(output, torch.Tensor):
                raise PolicyError(
                    f"the module returned a {type(output).__name__} where a tensor of actions or "
                    "logits is needed; wrap it in a module that returns just that"
                )
        return outputs

    def _tensors(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: self._tensors(part) for key, part in value.items()}
        if isinstance(value, tuple):
            return tuple(self._tensors(part) for part in value)
        # Values from the wire are read-only, which a tensor cannot be.
        array = np.require(value, requirements=["C", "W"])
        return torch.from_numpy(array).to(self._device)

    def _actions(self, contract: EnvContract, outputs: list[torch.Tensor], num_rows: int) -> object:
        spec = contract.action_space
        return unflatten(
            spec,
            [
                _leaf_actions(leaf, output, num_rows)
                for leaf, output in zip(leaves(spec), outputs, strict=True)
            ],
        )


def _leaf_actions(leaf: Leaf, output: torch.Tensor, num_rows: int) -> NDArray[Any]:
    """Turn one output into the actions ``(num_rows, *leaf.shape)`` of its leaf."""
    spec = leaf.spec
    is_float = output.is_floating_point()
    if isinstance(spec, DiscreteSpec) and is_float and output.shape == (num_rows, spec.n):
        return output.argmax(dim=1).cpu().numpy() + spec.start
    actions_shape = (num_rows, *leaf.shape)
    if output.shape == actions_shape and (isinstance(spec, BoxSpec) or not is_float):
        # NumPy has no bfloat16.
        return (output.float() if output.dtype is torch.bfloat16 else output).cpu().numpy()
    wanted = f"actions {actions_shape}"
    if isinstance(spec, DiscreteSpec):
        wanted = f"float logits {(num_rows, spec.n)} or integer actions {actions_shape}"
    elif not isinstance(spec, BoxSpec):
        wanted = f"integer {wanted}"
    raise PolicyError(
        f"the module returned {_describe(output)} for {leaf.name or 'the action'}; "
        f"{type(spec).__name__.removesuffix('Spec')} takes {wanted}"
    )


def _describe(value: Any) -> str:
    """Name dtypes and shapes of a batched value."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_describe(part)}" for key, part in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(_describe(part) for part in value) + ")"
    if isinstance(value, np.ndarray | torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return type(value).__name__
