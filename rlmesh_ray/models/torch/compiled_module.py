"""A torch module, compiled: tensors in, tensors out, nested as the module has them."""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.fast_path.sequential import hooks_on
from rlmesh_ray.models.onnx.compiled_forward import CompiledForward
from rlmesh_ray.models.onnx.onnx_export import EXPORTING, OnnxGraph


class CompiledTorchModule:
    """Runs a module in ONNX Runtime.

    Args:
        module: The module, in evaluation mode.
        inputs: An example of what it is called with: tensors, or dicts and tuples of them, nested
            as well; one batch dimension first.
        call: How it is called; by default as modules are.

    Raises:
        ConfigurationError: It cannot be compiled; the message has the reason.
        MissingPackageError: onnx or onnxruntime is missing.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *inputs: Any,
        call: Callable[..., Any] = torch.nn.Module.__call__,
    ) -> None:
        self._module = module
        # An exported program has a hook of torch's, which checks its input.
        is_exported = isinstance(module, torch.fx.GraphModule)
        self._hooks = () if is_exported else hooks_on(module)
        self._require_unhooked()
        if not all(isinstance(leaf, torch.Tensor) for leaf in _leaves(inputs)):
            raise ConfigurationError(f"{type(module).__name__} gets something else than tensors")
        self._pattern_in = _pattern(inputs)
        example = tuple(_map(_two_rows, each) for each in inputs)
        try:
            with EXPORTING, torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what torch copies
                # A module may take parts out of a dict.
                output = call(*copy.deepcopy((module, *example)))
        except ConfigurationError:
            raise
        except Exception as error:  # a module's own code may raise anything
            raise ConfigurationError(
                f"{type(module).__name__} cannot be run with two rows: {error}"
            ) from error
        names = [f"output_{number}" for number, _ in enumerate(_leaves(output))]
        if not all(isinstance(leaf, torch.Tensor) for leaf in _leaves(output)):
            raise ConfigurationError(f"{type(module).__name__} returns something else than tensors")

        self._pattern, patterns = _map(lambda _: None, output), _map(lambda _: None, example)

        def forward(called: Any, *leaves: torch.Tensor) -> Sequence[torch.Tensor]:
            given = iter(leaves)
            nested = (_map(lambda _: next(given), each) for each in patterns)
            return tuple(_leaves(call(called, *nested)))

        named = {f"input_{number}": leaf for number, leaf in enumerate(_leaves(example))}
        graph = OnnxGraph(module, forward, named, names)
        self._forward = CompiledForward(module, forward, graph, *named.values())
        self._is_plain = isinstance(output, torch.Tensor)

    def run(self, *inputs: Any) -> Any | None:
        """Return the module's outputs; None: torch must be asked.

        The inputs are nested otherwise, have their keys in another order, or other tensors, or
        numbers for which ``CompiledForward`` leaves it to torch; or the module has hooks.
        """
        if any(self._hooks):
            return None
        if self._is_plain and len(inputs) == 1 and isinstance(inputs[0], torch.Tensor):
            # As below, without what takes longer than the layers of a small network.
            (given,) = inputs
            if (given.dtype, given.shape[1:]) == self._pattern_in[0][0]:
                outputs = self._forward(given.numpy())
                return None if outputs is None else torch.from_numpy(outputs[0])
        if _pattern(inputs) != self._pattern_in:
            return None
        outputs = self._forward(*(leaf.numpy() for leaf in _leaves(inputs)))
        if outputs is None:
            return None
        found = iter(outputs)
        return _map(lambda _: torch.from_numpy(next(found)), self._pattern)

    def difference(self, output: Any, *inputs: Any) -> float:
        """See ``CompiledForward``."""
        expected = [leaf.detach().numpy() for leaf in _leaves(output)]
        return self._forward.difference(expected, *(leaf.numpy() for leaf in _leaves(inputs)))

    def load(self) -> None:
        """Take the module's weights as they are now.

        Raises:
            ConfigurationError: A part of the module has hooks, which would not be called.
        """
        self._require_unhooked()
        self._forward.load()

    def _require_unhooked(self) -> None:
        if any(self._hooks):
            raise ConfigurationError(f"{type(self._module).__name__} has hooks")


def _two_rows(leaf: torch.Tensor) -> torch.Tensor:
    return torch.cat([leaf[:1], leaf[:1]])


def _pattern(value: Any) -> tuple[Any, ...]:
    """Return what a compiled module cannot change of an input: keys in their order, and leaves.

    Of a tensor its dtype and the shape of a row.
    """
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape[1:]
    if isinstance(value, Mapping):
        return tuple((key, _pattern(part)) for key, part in value.items())
    if isinstance(value, tuple | list):
        return tuple((_pattern(part),) for part in value)
    return (type(value),)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, tuple | list):
        yield value
        return
    for part in value:
        yield from _leaves(part)


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _map(function, part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_map(function, part) for part in value)
    return function(value)
