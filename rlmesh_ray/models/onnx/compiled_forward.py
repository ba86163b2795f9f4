"""A torch module's forward pass, compiled: arrays in, arrays out, with the module's weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.onnx.onnx_export import Forward, OnnxGraph, weight_tensors
from rlmesh_ray.models.onnx.onnx_session import Arrays, OnnxSession

TOLERANCE = 1e-5
"""How far results may be from torch's, relative to the largest of them or to 1."""


class CompiledForward:
    """Runs what torch would, in ONNX Runtime.

    Where the runtime works on the weights as they are, as with dense layers, replacing them is a
    copy into its arrays. Where it has rearranged them, as with convolutions, a new session is
    made, which takes milliseconds and makes each run twice as fast.

    Args:
        module: The module, on the CPU and in evaluation mode. It keeps the weights; ``load`` takes
            them from there.
        forward: How it is called.
        inputs: An example for each input, by name; two rows each.
        outputs: A name for each output.

    Raises:
        ConfigurationError: The module cannot be compiled, or its compiled form computes something
            else.
        MissingPackageError: onnx or onnxruntime is missing.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Forward,
        inputs: Mapping[str, torch.Tensor],
        outputs: Sequence[str],
    ) -> None:
        self._module, self._forward = module, forward
        self._graph = graph = OnnxGraph(module, forward, inputs, outputs)
        names = graph.weight_names
        known = weight_tensors(module)
        self._tensors = [known[names[name]] for name in names]
        # Arrays of their own, with other numbers than the module's until ``load``: a session that
        # does not see the change has made other numbers of them.
        self._arrays = {
            name: np.full(tensor.shape, 0.1, tensor.numpy().dtype)
            for name, tensor in zip(names, self._tensors, strict=True)
        }
        self._is_live = True
        self._session = OnnxSession(graph.serialized({}), self._arrays)
        self.load()
        example = [each.numpy() for each in inputs.values()]
        if self.difference(example) > TOLERANCE:
            self._is_live = False
            self.load()
        for rows in (example, [np.concatenate([each, each[:1]]) for each in example]):
            difference = self.difference(rows)
            if difference > TOLERANCE:
                raise ConfigurationError(
                    f"{type(module).__name__} computes something else when it is compiled: the "
                    f"results differ by {difference:.1e} from torch's"
                )

    @property
    def is_rebuilt(self) -> bool:
        """Whether ``load`` makes a new session, instead of writing to the session's weights."""
        return not self._is_live

    def load(self) -> None:
        """Take the module's weights as they are now."""
        for array, tensor in zip(self._arrays.values(), self._tensors, strict=True):
            np.copyto(array, tensor.numpy())
        if not self._is_live:
            names = self._graph.weight_names
            weights = {names[each]: array for each, array in self._arrays.items()}
            self._session = OnnxSession(self._graph.serialized(weights))

    def __call__(self, *inputs: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the outputs, for one array for each input."""
        return self._session.run(*inputs)

    def difference(self, inputs: Arrays) -> float:
        """Return by how much the results differ from torch's: the largest of all differences.

        It is relative to the largest result, or to 1. Infinite: the shapes differ, or a number is
        NaN on one side only.
        """
        with torch.no_grad():
            expected = self._forward(self._module, *map(torch.from_numpy, inputs))
        found = self._session.run(*inputs)
        return max(map(_difference, (each.numpy() for each in expected), found), default=0.0)


def _difference(expected: NDArray[Any], found: NDArray[Any]) -> float:
    if expected.shape != found.shape or not np.array_equal(np.isnan(expected), np.isnan(found)):
        return float("inf")
    apart = np.abs(found - expected)[~np.isnan(expected) & (found != expected)]
    scale = max(1.0, float(np.abs(expected).max(initial=0.0, where=np.isfinite(expected))))
    return float(apart.max(initial=0.0)) / scale
