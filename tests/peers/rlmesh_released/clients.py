"""The released clients, of NumPy and of torch, both seen as environments of NumPy arrays."""

from typing import Any

import numpy as np
from rlmesh import numpy as in_arrays  # type: ignore[import-not-found]  # another environment's


def connect(address: str, kind: str, framework: str = "numpy", **options: Any) -> Any:
    """Return a client: ``kind`` is ``env`` or ``vector``, ``framework`` ``numpy`` or ``torch``."""
    name = {"env": "RemoteEnv", "vector": "RemoteVectorEnv"}[kind]
    if framework == "numpy":
        return getattr(in_arrays, name)(address, **options)
    # Takes two seconds.
    from rlmesh import torch as in_tensors

    return _AsArrays(getattr(in_tensors, name)(address, **options))


class _AsArrays:
    """Gives a torch client tensors, and back what its tensors hold."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self, **options: Any) -> Any:
        return _arrays(self._env.reset(**options))

    def step(self, action: Any) -> Any:
        return _arrays(self._env.step(_tensors(action)))

    def render(self) -> Any:
        return _arrays(self._env.render())


def _arrays(value: Any) -> Any:
    import torch

    return _mapped(value, torch.Tensor, lambda tensor: tensor.numpy())


def _tensors(value: Any) -> Any:
    import torch

    return _mapped(value, np.ndarray, lambda array: torch.from_numpy(array.copy()))


def _mapped(value: Any, kind: type, change: Any) -> Any:
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(part, kind, change) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(part, kind, change) for part in value)
    return value
