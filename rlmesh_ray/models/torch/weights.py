"""Reading and replacing all weights of a module."""

import contextlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from rlmesh_ray.errors import PolicyError

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors of a module, each with its new value."""


def weights_of(module: torch.nn.Module) -> dict[str, Any]:
    """Copy the state dict: NumPy arrays, and tensors for dtypes that NumPy does not have."""
    return {name: _copy(tensor) for name, tensor in _tensors(module).items()}


def check_weights(
    module: torch.nn.Module, weights: object, *, optional: Collection[str] = ()
) -> Pairs:
    """Compare new weights with a module's own; nothing changes.

    Args:
        module: The module whose weights are to be replaced.
        weights: Name -> array or tensor, with the names, shapes and dtypes of the state dict.
        optional: Names that may be missing; their weights stay unchanged.

    Returns:
        The argument for ``replace``.

    Raises:
        PolicyError: The names differ, or a shape or dtype does, or a tensor is no dense one that
            holds numbers (sparse, nested, on the meta device, ...).
    """
    if not isinstance(weights, Mapping):
        raise PolicyError(
            f"weights are a mapping of names to arrays, as state_dict() returns it, not a "
            f"{type(weights).__name__}"
        )
    tensors = _tensors(module)
    missing = sorted(tensors.keys() - weights.keys() - set(optional))
    unknown = sorted(map(str, weights.keys() - tensors.keys()))
    if missing or unknown:
        raise PolicyError(
            f"the weights are another module's: missing are {_some(missing)}, unknown are "
            f"{_some(unknown)}"
        )
    return [(tensors[name], _fitting(name, tensors[name], weights[name])) for name in weights]


def replace(pairs: Pairs) -> None:
    """Copy new weights into the tensors that hold the old ones.

    In place: compiled code and captured graphs have the addresses of the tensors.
    """
    with torch.no_grad():
        for tensor, value in pairs:
            tensor.copy_(value)


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    # Extra state may be any object, and is not a weight.
    state = module.state_dict()
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _copy(tensor: torch.Tensor) -> Any:
    copied = tensor.detach().clone().cpu()
    return copied if tensor.dtype is torch.bfloat16 else copied.numpy()


def _fitting(name: str, tensor: torch.Tensor, value: object) -> torch.Tensor:
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        # A copy: a tensor can neither be read-only nor step backwards.
        array = np.array(value, value.dtype.newbyteorder("="))
        with contextlib.suppress(TypeError):  # torch has no such dtype
            value = torch.from_numpy(array)
    if not isinstance(value, torch.Tensor):
        raise PolicyError(f"weight {name} is neither an array of numbers nor a tensor")
    if not _is_plain(value):
        raise PolicyError(
            f"weight {name} is a {type(value).__name__} ({value.layout}, on {value.device.type}), "
            "which cannot be copied from; give a plain dense tensor that holds numbers, or an "
            "array; nothing has changed"
        )
    if (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        raise PolicyError(
            f"weight {name} is {_kind(value)}, but the module's is {_kind(tensor)}; nothing has "
            "changed"
        )
    return value


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether copying from it cannot fail: dense, with storage, and no other class."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.device.type != "meta"
    )


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5]) or "none"
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
