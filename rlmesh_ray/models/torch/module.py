"""A torch module on its device, run with batches of few sizes."""

import contextlib
import copy
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from rlmesh_ray.errors import ConfigurationError, ContractMismatchError, PolicyError, RlmeshError
from rlmesh_ray.models.batch_buckets import BatchBuckets, PaddedBatch
from rlmesh_ray.models.fast_path.sequential import SequentialFastPath, is_sequential
from rlmesh_ray.models.nesting import describe, mapped
from rlmesh_ray.models.onnx.compiled_forward import CompiledForward
from rlmesh_ray.models.onnx.inference_choice import InferenceChoice
from rlmesh_ray.models.torch.weights import check_weights, replace, weights_of
from rlmesh_ray.models.trusted_code import only_computes
from rlmesh_ray.options import require_inference
from rlmesh_ray.spaces.contract import EnvContract

# Torch's default limit of compiled versions of a function, beyond which it runs uncompiled.
_MOST_COMPILED_SIZES = 8


class TorchModule:
    """Runs a module without gradients.

    Args:
        module: The module, which is switched to evaluation mode; its parts must not be replaced.
        device: Torch's name of the device to move it to; None: it is not moved.
        buckets: Row counts that the module is run with; see ``BatchBuckets``.
        inference: ``"torch"``; ``"compiled"``: on a CPU in ONNX Runtime, on CUDA through
            ``torch.compile`` and with captured graphs, once for each bucket; ``"auto"``: on a CPU
            compiled, where that is possible.

    Raises:
        ConfigurationError: There is no such device, the buckets are not ascending or too many to
            compile, or the module cannot be compiled.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        device: str | None = None,
        buckets: Sequence[int] = (),
        inference: str = "auto",
    ) -> None:
        require_inference(inference)
        # A program from torch.export was traced in one mode and cannot switch.
        with contextlib.suppress(NotImplementedError):
            module.eval()
        if device is not None:
            module.to(torch_device(device))
        self.module = module
        """The module."""
        first = next(iter([*module.parameters(), *module.buffers()]), None)
        self.device = torch.device(device or "cpu") if first is None else first.device
        """The device to which inputs are moved."""
        is_torchs = inference == "compiled" and self.device.type != "cpu"
        self.only_computes = not is_torchs and only_computes(module, self.device)
        """Whether a run waits for nothing but the processor, see ``trusted_code``."""
        self.kind = _kind(module)
        """The kind of module, for display."""
        self._buckets = BatchBuckets(buckets)
        self.parts = self._buckets.parts
        """Returns the parts of a batch, given its number of rows, each of which runs at once."""
        self._is_compiled_by_torch = is_torchs
        self._call: Callable[..., Any] = (
            SequentialFastPath(module) if is_sequential(module) else module
        )
        if is_torchs:
            if isinstance(module, torch.jit.ScriptModule):
                raise ConfigurationError(
                    'TorchScript is compiled already; on CUDA inference is "torch" for it'
                )
            self._call = compiled(module, self.device, self._buckets)
        self._inference = InferenceChoice(
            inference, partial(CompiledForward, module), device=self.device.type
        )

    def torch_reason(self) -> str | None:
        return self._inference.torch_reason

    def trial_parts(self, num_lanes: int) -> list[PaddedBatch]:
        """Return the parts of a trial run before the first batch of a route.

        They are one row, and two where batches of the route may have several and are not padded: a
        program may have been exported for one. Or they are all sizes that have to be compiled.
        """
        sizes = self._buckets.sizes if self._is_compiled_by_torch else ()
        if not sizes:
            sizes = (1,) if num_lanes == 1 or self._buckets.sizes else (1, 2)
        return [part for size in sizes for part in self.parts(size)]

    def misfit(
        self, error: RlmeshError, contract: EnvContract, part: PaddedBatch
    ) -> ContractMismatchError:
        remedy = (
            "; it works with one row: export it for any number of rows, or have batches cut to one "
            "(buckets=[1], --bucket 1)"
            if part.size > 1 and not self._buckets.sizes
            else ""
        )
        return ContractMismatchError(
            f"the torch module cannot act in {contract.id}: {error}{remedy}"
        )

    def tensors(self, value: Any, part: PaddedBatch) -> Any:
        """Return a part of a batch as tensors ``(part.size, ...)``, padded with zeros.

        Args:
            value: A batched value: an array, or a dict or tuple of such.
            part: The part of the batch.
        """
        if isinstance(value, np.ndarray):  # as most are
            return self._tensor(value, part)
        return mapped(lambda array: self._tensor(array, part), value)

    def try_out(self, *inputs: Any) -> Any:
        """Run the module on the result of ``tensors`` in torch, and compile it if that is wanted.

        Raises:
            ConfigurationError: It cannot be compiled, and ``inference`` is ``"compiled"``.
            PolicyError: The module raised; its own error is the cause.
        """
        given = copy.deepcopy(inputs)  # it may take parts out of a dict
        output = self.run(*given, call=self._call)
        self._inference.prepare(*inputs)
        return output

    def run(self, *inputs: Any, call: Callable[..., Any] | None = None) -> Any:
        """Run the module on the result of ``tensors``.

        The next run may overwrite the output.

        Args:
            inputs: The inputs.
            call: What runs it in torch; None: as ``inference`` says.

        Raises:
            PolicyError: The module raised; its own error is the cause.
        """
        try:
            with torch.inference_mode():
                if call is not None:
                    return call(*inputs)
                return self._inference.run(self._call, *inputs)
        except Exception as error:
            raise PolicyError(
                f"the module raised {type(error).__name__} on observations "
                f"{describe(inputs[0])}: {error}"
            ) from error

    def get_weights(self) -> dict[str, Any]:
        return weights_of(self.module)

    def set_weights(self, weights: object) -> None:
        """Replace all weights, in place.

        Raises:
            PolicyError: They do not fit this module; nothing has changed.
        """
        replace(check_weights(self.module, weights))
        self._inference.load()

    def _tensor(self, array: np.ndarray[Any, Any], part: PaddedBatch) -> torch.Tensor:
        if self.device.type != "cpu":
            return self._on_device(array, part)
        if part.size == len(array):
            # Values from the wire are read-only, which a tensor cannot be.
            flags = array.flags
            if not (flags.c_contiguous and flags.writeable):
                array = array.copy()
        else:
            padded = np.zeros((part.size, *array.shape[1:]), array.dtype)
            padded[: part.num_rows] = array[part.rows]
            array = padded
        return torch.from_numpy(array)

    def _on_device(self, array: np.ndarray[Any, Any], part: PaddedBatch) -> torch.Tensor:
        """Copy rows to the device, once; padding is written there."""
        rows = torch.from_numpy(_for_reading(array[part.rows]))
        if part.size == part.num_rows:
            return rows.to(self.device)
        padded = rows.new_empty((part.size, *rows.shape[1:]), device=self.device)
        padded[: part.num_rows] = rows
        padded[part.num_rows :] = 0
        return padded


def _for_reading(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array as torch takes it, without a copy; the tensor must not be written to."""
    if not array.flags.c_contiguous:
        return array.copy()
    if array.flags.writeable:
        return array
    view = {**array.__array_interface__, "data": (array.ctypes.data, False)}
    return np.asarray(SimpleNamespace(__array_interface__=view, owner=array))


def torch_device(name: str) -> torch.device:
    """Return the device of that name.

    Raises:
        ConfigurationError: It is not available; the message lists those that are.
    """
    there = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"device={name} cannot run policies; available are {there}")
    is_there = device.type == "cpu" or (
        torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
    )
    if not is_there:
        reason = "torch finds no such GPU" if torch.version.cuda else "this torch has no CUDA"
        raise ConfigurationError(
            f"device={name} is not available: {reason}; use one of {there}, or install a torch "
            "with CUDA and its driver"
        )
    return device


def _kind(module: torch.nn.Module) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript"
    if isinstance(module, torch.fx.GraphModule):
        return "torch.export"
    return f"torch module {type(module).__name__}"


def compiled(function: Any, device: torch.device, buckets: BatchBuckets) -> Any:
    """Compile for the bucket sizes, or for any size where there are none.

    Raises:
        ConfigurationError: There are more buckets than torch compiles.
    """
    if len(buckets.sizes) > _MOST_COMPILED_SIZES:
        raise ConfigurationError(
            f"{len(buckets.sizes)} buckets are more than torch compiles for one module; give "
            f"{_MOST_COMPILED_SIZES} at most"
        )
    # On CUDA: graphs that are captured once, in the first run of each size, and replayed. Those of
    # the mode "reduce-overhead" can be replayed in the thread only that has imported their code
    # (up to torch 2.12), while each server has a thread of its own. A capture fails where another
    # thread of the process uses the GPU meanwhile: policies are checked one after the other.
    captures: Any = {"triton.cudagraphs": True, "triton.cudagraph_trees": False}
    return torch.compile(
        _with_own_code(function),
        dynamic=not buckets.sizes,
        options=captures if device.type == "cuda" and buckets.sizes else None,
    )


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls another one, with a code object of its own.

    Torch keeps compiled code and captured graphs for each code object. Modules of one class would
    share them, while a captured graph has the addresses of one module's weights.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)
