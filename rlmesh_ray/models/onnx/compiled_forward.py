"""A torch module's forward pass, compiled: arrays in, arrays out, with the module's weights."""

from collections.abc import Iterator, Sequence
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

_LARGE = 1e6
"""Such numbers, as masks put in front of actions, are compared by themselves."""
_REARRANGED = {"Conv", "ConvTranspose"}
"""Operations whose weights the runtime rearranges, so that it sees no change of them."""


class CompiledForward:
    """Runs what torch would, in ONNX Runtime.

    Where the runtime works on the weights as they are, as with dense layers, replacing them is a
    copy into its arrays. Where it has rearranged them, as with convolutions, a new session is
    made, which takes milliseconds and makes each run twice as fast. Proven with the examples and
    with drawn inputs of several sizes: zeros would show nothing of a first layer's weights.

    Args:
        module: The module, which keeps the weights; ``load`` takes them from there.
        forward: How it is called.
        graph: The graph of that.
        examples: An example for each input, two rows each.

    Raises:
        ConfigurationError: The compiled module computes something else.
        MissingPackageError: onnxruntime is missing.
    """

    def __init__(
        self, module: nn.Module, forward: Forward, graph: OnnxGraph, *examples: torch.Tensor
    ) -> None:
        self._module, self._graph = module, graph
        # Arrays of their own, with other numbers than any module's until they are written to: a
        # session that does not see the change has made other numbers of them.
        own = weight_tensors(graph.copy)
        self._arrays = {
            name: np.full(own[theirs].shape, 0.1, own[theirs].numpy().dtype)
            for name, theirs in graph.weight_names.items()
        }
        self._is_live = _REARRANGED.isdisjoint(graph.operations)
        self._session = OnnxSession(self._serialized(), self._arrays)
        self._load(graph.copy)
        for batch in _batches(examples):
            try:
                with torch.no_grad():
                    expected = [each.numpy() for each in forward(graph.copy, *batch)]
            except Exception:  # noqa: BLE001  # a module's own code may refuse what was drawn
                continue
            arrays = [each.numpy() for each in batch]
            if self.difference(expected, *arrays) > TOLERANCE and self._is_live:
                self._is_live = False
                self._load(graph.copy)
            difference = self.difference(expected, *arrays)
            if difference > TOLERANCE:
                raise ConfigurationError(
                    f"{type(module).__name__} computes something else when it is compiled: the "
                    f"results differ by {difference:.1e} from torch's"
                )
        self.load()

    @property
    def is_rebuilt(self) -> bool:
        """Whether ``load`` makes a new session, instead of writing to the session's weights."""
        return not self._is_live

    def load(self) -> None:
        """Take the module's weights as they are now."""
        self._load(self._module)

    def _load(self, module: nn.Module) -> None:
        tensors, names = weight_tensors(module), self._graph.weight_names
        for name, array in self._arrays.items():
            np.copyto(array, tensors[names[name]].numpy())
        if not self._is_live:
            self._session = OnnxSession(self._serialized())

    def _serialized(self) -> bytes:
        names = self._graph.weight_names
        return self._graph.serialized({names[each]: own for each, own in self._arrays.items()})

    def __call__(self, *inputs: NDArray[Any]) -> list[NDArray[Any]]:
        """Return the outputs, for one array for each input."""
        return self._session.run(*inputs)

    def difference(self, expected: Arrays, *inputs: NDArray[Any]) -> float:
        """Return the largest ``difference`` from what torch returned for the same inputs."""
        return max(map(difference, expected, self._session.run(*inputs)), default=0.0)


def difference(expected: NDArray[Any], found: NDArray[Any]) -> float:
    """Return the largest difference of two arrays, relative to the largest number or to 1.

    Numbers of ``_LARGE`` and above are no measure for others. Infinite: the shapes differ, or a
    number is NaN or infinite in one only.
    """
    own, other = expected.astype(np.float64), found.astype(np.float64)
    if own.shape != other.shape:
        return float("inf")
    is_finite = np.isfinite(own)
    if not np.array_equal(np.where(is_finite, 0.0, own), np.where(is_finite, 0.0, other), True):
        return float("inf")
    own, other = own[is_finite], other[is_finite]
    sizes = np.abs(own)
    scale = max(1.0, float(sizes.max(initial=0.0, where=sizes < _LARGE)))
    apart = np.abs(other - own) / np.where(sizes < _LARGE, scale, sizes)
    return float(np.nan_to_num(apart, nan=np.inf, posinf=np.inf).max(initial=0.0))


def _batches(examples: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Return the examples with two and three rows, then drawn inputs: positive, large and small."""
    yield [each[:2] for each in examples]
    yield [torch.cat([each, each])[:3] for each in examples]
    generator = torch.Generator().manual_seed(1)
    for size in (1.0, 1e-2, 1e-4):
        yield [
            torch.rand((3, *each.shape[1:]), generator=generator).mul(size).to(each.dtype)
            if each.is_floating_point()
            else torch.randint(2, (3, *each.shape[1:]), generator=generator).to(each.dtype)
            for each in examples
        ]
