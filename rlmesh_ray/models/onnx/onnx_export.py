"""Export of torch modules as ONNX models: the one exporter of the package.

A graph is made once. For other weights only its numbers are replaced.
"""

import contextlib
import copy
import functools
import importlib.util
import io
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.jit._trace import TracerWarning

from rlmesh_ray.errors import ConfigurationError, MissingPackageError, install_command
from rlmesh_ray.models.torch.module import weight_tensors

_OPSET = 17
_PREFIX = "module."
_CANARY = "warnings are still recorded"
_TRIES = 5
_INDICES = {
    **dict.fromkeys(("Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND"), 1),
    "OneHot": 0,
}
"""Operations that look up rows, and which of their inputs has the indices."""
_MOVING = {
    *("Cast", "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split"),
    *("Squeeze", "Tile", "Transpose", "Unsqueeze"),
}
"""Operations that hand on numbers as they are."""
_COUNTING = {"Shape", "Size", "ArgMax", "ArgMin", "NonZero"}
"""Operations that give no numbers below 0; so does the second output of TopK."""

EXPORTING = threading.RLock()
"""torch exports one module at a time, and how warnings are shown is one for the process."""

Forward = Callable[..., Sequence[torch.Tensor]]
"""Calls a module: from the module and one tensor for each input to one tensor for each output."""


class OnnxGraph:
    """The graph of a module's forward pass, and which of its numbers are the module's weights.

    Args:
        module: The module, on the CPU. It is neither changed nor run, but a copy of it in
            evaluation mode.
        forward: How it is called.
        inputs: An example for each input, by name; two rows each. The number of rows stays free.
        outputs: A name for each output.

    Raises:
        ConfigurationError: The module cannot be written as ONNX, or what it computes is chosen by
            the values of its input.
        MissingPackageError: The package onnx is missing.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Forward,
        inputs: Mapping[str, torch.Tensor],
        outputs: Sequence[str],
    ) -> None:
        try:
            import onnx
        except ImportError as error:
            raise MissingPackageError(f"models in ONNX need: {install_command('onnx')}") from error
        with EXPORTING:
            tries = (self._exported(module, forward, inputs, outputs) for _ in range(_TRIES))
            made = next(filter(None, tries), None)
        if made is None:
            raise ConfigurationError(
                f"{type(module).__name__} cannot be written as ONNX: another thread changes how "
                "warnings are shown, by which branches are found"
            )
        self._model = onnx.load_model_from_string(made)
        _declare_all(self._model.graph.input, inputs)
        known = weight_tensors(module)
        self.weight_names = {
            each.name: each.name.removeprefix(_PREFIX)
            for each in self._model.graph.initializer
            if each.name.removeprefix(_PREFIX) in known
        }
        """Names of the weights in the graph, and the module's names of the same."""

    def _exported(
        self,
        module: nn.Module,
        forward: Forward,
        inputs: Mapping[str, torch.Tensor],
        outputs: Sequence[str],
    ) -> bytes | None:
        """Return the model; None: not all warnings have been seen."""
        name = type(module).__name__
        _register_nanmean()
        made: Any = io.BytesIO()
        axes = {each: {0: "n"} for each in (*inputs, *outputs)}
        try:
            with (
                warnings.catch_warnings(record=True) as caught,
                torch.no_grad(),
                _without_fused_attention(),
            ):
                warnings.simplefilter("always")
                # torch merges weights of equal values, such as two biases of zeros, which would be
                # different after the first update: so the graph is made of a copy without such.
                self.copy = _with_distinct_weights(module)
                """What the graph was made of: a copy with other weights, in evaluation mode."""
                wrapped: nn.Module = _Called(self.copy, forward)
                if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
                    # The exporter does not look into TorchScript, but keeps what was traced.
                    trace: Any = torch.jit.trace
                    wrapped = trace(wrapped, tuple(inputs.values()), check_trace=False)
                # The newer exporter takes ten seconds and another package, for the same graph.
                torch.onnx.export(
                    wrapped,
                    tuple(inputs.values()),
                    made,
                    dynamo=False,
                    opset_version=_OPSET,
                    do_constant_folding=False,  # else weights would lose their names
                    training=torch.onnx.TrainingMode.PRESERVE,  # likewise, before BatchNorm
                    input_names=list(inputs),
                    output_names=list(outputs),
                    dynamic_axes=axes,
                )
                warnings.warn(_CANARY, TracerWarning, stacklevel=1)
        except Exception as error:  # a module's own code may raise anything
            reason = (str(error).splitlines() or [""])[0]
            raise ConfigurationError(f"{name} cannot be written as ONNX: {reason}") from error
        if not caught or str(caught.pop().message) != _CANARY:
            return None
        for each in caught:
            if issubclass(each.category, TracerWarning) and not _is_known(each.filename):
                raise ConfigurationError(
                    f"{name} cannot be written as ONNX: what it computes depends on values that "
                    f"only a run has ({each.filename}:{each.lineno})"
                )
        exported: bytes = made.getvalue()
        return exported

    @property
    def operations(self) -> set[str]:
        return {each.op_type for each in _nodes(self._model.graph)}

    def index_inputs(self) -> list[int]:
        """Return the positions of the inputs by whose numbers rows are looked up.

        Raises:
            ConfigurationError: Rows are looked up by numbers that are computed, which may be below
                0: ONNX counts these from the end, and torch refuses them.
        """
        names = [each.name for each in self._model.graph.input]
        # Of which inputs a value has the numbers themselves; of none, where it is computed of them.
        origins = {name: {name} for name in names}
        found: set[str] = set()
        for node in self._model.graph.node:
            position = _INDICES.get(node.op_type)
            index = "" if position is None else node.input[position]
            is_hidden = any(part.op_type in _INDICES for part in _nodes(*_subgraphs(node)))
            if is_hidden or origins.get(index) == set():
                raise ConfigurationError("it looks up rows by numbers that it computes")
            found |= origins.get(index, set())
            sources = [each for each in node.input if each in origins]
            if not sources or node.op_type in _COUNTING:
                continue
            # A lookup takes its elements from the first input, the table; the index only chooses.
            moved = [
                origins[each]
                for each in sources
                if node.op_type == "Concat" or each == node.input[0]
            ]
            is_moved = node.op_type in _MOVING and moved and all(moved)
            outputs = node.output[:1] if node.op_type == "TopK" else node.output
            origins |= dict.fromkeys(outputs, set().union(*moved) if is_moved else set())
        return [names.index(name) for name in found]

    def serialized(
        self, weights: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None
    ) -> bytes:
        """Return the model with these weights, by the module's names; others stay as they are.

        Args:
            weights: The weights.
            metadata: For the model's ``metadata_props``.
        """
        from onnx import helper, numpy_helper

        for place in self._model.graph.initializer:
            values = weights.get(self.weight_names.get(place.name, ""))
            if values is not None:
                place.CopyFrom(numpy_helper.from_array(np.asarray(values), place.name))
        helper.set_model_props(self._model, dict(metadata or {}))
        serialized: bytes = self._model.SerializeToString()
        return serialized


def _subgraphs(node: Any) -> list[Any]:
    return [each.g for each in node.attribute if each.HasField("g")]


def _nodes(*graphs: Any) -> Iterator[Any]:
    for node in (each for graph in graphs for each in graph.node):
        yield node
        yield from _nodes(*_subgraphs(node))


def _declare_all(declared: Any, inputs: Mapping[str, torch.Tensor]) -> None:
    """Declare inputs that the module does not use, too: the exporter leaves them out."""
    from onnx import helper

    used = {each.name: each for each in declared}
    every = [
        used.get(name)
        or helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(rows.numpy().dtype), ["n", *rows.shape[1:]]
        )
        for name, rows in inputs.items()
    ]
    del declared[:]
    declared.extend(every)


def _is_known(filename: str) -> bool:
    """Return whether a file is torch's or Ray's, whose branches check shapes."""
    return any(
        Path(filename).is_relative_to(folder)
        for spec in map(importlib.util.find_spec, ("torch", "ray"))
        for folder in (spec and spec.submodule_search_locations) or ()
    )


@contextlib.contextmanager
def _without_fused_attention() -> Iterator[None]:
    """Have torch's attention run as separate operations, which ONNX has."""
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


class _Called(nn.Module):
    """A module as the exporter wants it: tensors in, tensors out."""

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.module = module
        self.run = forward

    def forward(self, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        return self.run(self.module, *inputs)


def evaluating(module: nn.Module) -> nn.Module:
    copied = copy.deepcopy(module)
    with contextlib.suppress(NotImplementedError):  # programs of torch.export have one mode
        copied.eval()
    return copied


def _with_distinct_weights(module: nn.Module) -> nn.Module:
    """Return a copy whose weights are small positive numbers, no two tensors alike."""
    copied = evaluating(module)
    generator = torch.Generator().manual_seed(0)
    for tensor in weight_tensors(copied).values():
        if tensor.is_floating_point():
            tensor.uniform_(0.05, 0.25, generator=generator)
    return copied


@functools.cache
def _register_nanmean() -> None:
    """Teach torch's exporter what a dueling head does; the same as a mean where nothing is NaN."""
    from torch.onnx import symbolic_helper

    def nanmean(graph: Any, values: Any, axes: Any, keep: Any, _dtype: Any) -> Any:
        return graph.op("ReduceMean", values, axes_i=axes, keepdims_i=keep)

    onnx: Any = torch.onnx
    parse = symbolic_helper.parse_args("v", "is", "i", "none")
    onnx.register_custom_op_symbolic("aten::nanmean", parse(nanmean), 9)
