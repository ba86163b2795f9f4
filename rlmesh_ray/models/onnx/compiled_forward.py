"""A module compiled with its weights, and whether it runs so or in torch: the option inference."""

import copy
import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.nesting import filled, form, leaves, mapped
from rlmesh_ray.models.onnx.onnx_export import EXPORTING, Forward, OnnxGraph, evaluating
from rlmesh_ray.models.onnx.onnx_models import OnnxSession, Weights
from rlmesh_ray.models.torch.module import hooks_on, weight_tensors

_LOG = logging.getLogger(__name__)

_LEFT_TO_TORCH = "the last batch was left to torch, for its form or its numbers, or for hooks"
TOLERANCE = 1e-5
"""How far results may be from torch's, relative to the largest of them or to 1."""

Batches = Iterable[tuple[Sequence[torch.Tensor], float]]
"""Inputs, and how far the results may be apart."""
_LARGE = 1e6
"""Such numbers, as masks put in front of actions, are compared by themselves."""
_REARRANGED = {"Conv", "ConvTranspose"}
"""Operations whose weights the runtime rearranges, so that it sees no change of them."""
_EXTREMES = {"MaxPool", "GlobalMaxPool", "ReduceMax", "ReduceMin", "ArgMax", "ArgMin", "TopK"}
_NAN_DROPPED = {*_EXTREMES, "Sign"}
"""Operations that take NaN for a small number, where torch goes on with NaN."""


class CompiledForward:
    """Runs what torch would, in ONNX Runtime.

    Where the runtime works on the weights as they are, as with dense layers, replacing them is a
    copy into its arrays. Where it has rearranged them, as with convolutions, a new session is
    made, which takes tens of milliseconds and makes each run twice as fast. Proven with the
    examples and with drawn inputs of several sizes: zeros would show nothing of a first layer's
    weights.

    Numbers and tensors that are attributes of the module's parts, and buffers outside of its state,
    are constants here. If one is another one in ``load``, the results are compared once more.

    Args:
        module: The module on the CPU, which keeps its mode and the weights: those that are
            changed in place, as optimizers do, act from the next run on, and ``load`` takes what
            came otherwise.
        inputs: An example of what it is called with: tensors, or dicts and tuples of them, nested
            as well; one batch dimension first.
        call: How it is called; by default as modules are.

    Raises:
        ConfigurationError: It cannot be compiled, or computes something else then; the message has
            the reason.
        MissingPackageError: onnx or onnxruntime is missing.
    """

    def __init__(
        self, module: nn.Module, *inputs: Any, call: Callable[..., Any] = nn.Module.__call__
    ) -> None:
        self._module = module
        # An exported program has a hook of torch's, which checks its input.
        self._hooks = () if isinstance(module, torch.fx.GraphModule) else hooks_on(module)
        self._require_unhooked()
        if any(each.device.type != "cpu" for each in weight_tensors(module).values()):
            raise ConfigurationError("the module is not on the CPU")
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves(inputs)):
            raise ConfigurationError(f"{type(module).__name__} gets something else than tensors")
        self._form_in = form(inputs)
        nested = tuple(mapped(_two_rows, each) for each in inputs)
        output = _called(call, module, nested)
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves(output)):
            raise ConfigurationError(f"{type(module).__name__} returns something else than tensors")
        # The exporter, the runtime and the proof know flat tensors only.
        self.nesting_out = mapped(lambda _: None, output)
        """How the outputs are nested."""
        nesting_in = mapped(lambda _: None, nested)

        def forward(called: Any, *given: torch.Tensor) -> Sequence[torch.Tensor]:
            return tuple(leaves(call(called, *filled(nesting_in, given))))

        examples = list(leaves(nested))
        self._is_plain = isinstance(output, torch.Tensor)
        self._called = forward
        self._graph = graph = OnnxGraph(
            module,
            forward,
            {f"input_{number}": leaf for number, leaf in enumerate(examples)},
            [f"output_{number}" for number, _ in enumerate(leaves(output))],
        )
        # Without rows: these would be kept as long as the module.
        self._no_rows = [each.new_empty(0, *each.shape[1:]) for each in examples]
        # Arrays of their own, with other numbers than any module's until they are written to: a
        # session that does not see the change has made other numbers of them.
        own = weight_tensors(graph.copy)
        self._arrays = {
            name: np.full(own[theirs].shape, 0.1, own[theirs].numpy().dtype)
            for name, theirs in graph.weight_names.items()
        }
        self._is_live = _REARRANGED.isdisjoint(graph.operations)
        self._drops_nan = not _NAN_DROPPED.isdisjoint(graph.operations)
        self._indices = graph.index_inputs()
        self._is_broken = False
        self._session = OnnxSession(self._serialized(self._arrays), self._arrays)
        # Tensors that were made in inference mode count no changes; nothing changes them in place.
        self._counted = [
            each for each in weight_tensors(module).values() if not each.is_inference()
        ]
        self._versions: list[int] = []
        self._constants = _constants(module)
        self._load(graph.copy)
        if self._is_live and not self._is_alike(graph.copy, _positive(examples)):
            self._is_live = False
            self._session = OnnxSession(self._serialized(self._arrays))
        self._prove(graph.copy, _positive(examples))
        # With the weights of now, signed numbers, which are rounded otherwise where they are large.
        own = weight_tensors(module)
        for name, tensor in weight_tensors(graph.copy).items():
            tensor.copy_(own[name])
        self.load()
        self._prove(graph.copy, [([each[:2] for each in examples], TOLERANCE), *_signed(examples)])

    def load(self) -> None:
        """Take the module's weights as they are now.

        Raises:
            ConfigurationError: They cannot be taken, or constants have changed, and with them the
                results, or a part of the module has hooks, which would not be called. What ran
                until now must not be used any more.
        """
        self._require_unhooked()
        versions = [each._version for each in self._counted]
        try:
            self._load(self._module)
            constants = _constants(self._module)
            if constants != self._constants:
                self._prove(evaluating(self._module), _signed(self._no_rows))
        except ConfigurationError:
            raise
        except Exception as error:  # ONNX Runtime's have no base class
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ConfigurationError(f"new weights cannot be taken: {reason}") from error
        self._versions, self._constants = versions, constants

    def _load(self, module: nn.Module) -> None:
        tensors, names = weight_tensors(module), self._graph.weight_names
        weights = {name: tensors[names[name]].numpy() for name in self._arrays}
        if not self._is_live:
            if all(np.array_equal(own, weights[name]) for name, own in self._arrays.items()):
                return  # a new session takes long
            self._session = OnnxSession(self._serialized(weights))
        for name, array in self._arrays.items():
            np.copyto(array, weights[name])
        self._is_broken = self._drops_nan and any(map(_is_not_finite, weights.values()))

    def _serialized(self, weights: Weights) -> bytes:
        names = self._graph.weight_names
        return self._graph.serialized({names[each]: own for each, own in weights.items()})

    def run(self, *inputs: Any) -> Any | None:
        """Return the module's outputs, as torch's; None: torch must be asked.

        The inputs are nested otherwise, have their keys in another order, or other tensors, or
        numbers for which ``arrays`` leaves it to torch; or the module has hooks.
        """
        if any(self._hooks):
            return None
        if self._is_plain and len(inputs) == 1 and isinstance(inputs[0], torch.Tensor):
            # As below, without what takes longer than the layers of a small network.
            (given,) = inputs
            if (given.dtype, given.shape[1:]) == self._form_in[0][0]:
                outputs = self.arrays(given.numpy())
                return None if outputs is None else torch.from_numpy(outputs[0])
        if form(inputs) != self._form_in:
            return None
        outputs = self.arrays(*(leaf.numpy() for leaf in leaves(inputs)))
        if outputs is None:
            return None
        return filled(self.nesting_out, map(torch.from_numpy, outputs))

    def arrays(self, *inputs: NDArray[Any]) -> list[NDArray[Any]] | None:
        """Return the outputs' leaves, for one array for each leaf of the inputs; None: see ``run``.

        Of NaN, which infinity may lead to, some operations make numbers; and torch refuses indices
        below 0.
        """
        if self._versions != [each._version for each in self._counted]:
            self.load()
        if self._is_broken or (self._drops_nan and any(map(_is_not_finite, inputs))):
            return None
        for position in self._indices:
            if (inputs[position] < 0).any():
                return None
        return self._session.run(*inputs)

    def _require_unhooked(self) -> None:
        if any(self._hooks):
            raise ConfigurationError(f"{type(self._module).__name__} has hooks")

    def _prove(self, module: nn.Module, batches: Batches) -> None:
        if not self._is_alike(module, batches):
            raise ConfigurationError(
                f"{type(self._module).__name__} computes something else when it is compiled: for "
                "the same inputs, some of which were drawn, torch returns other numbers"
            )

    def _is_alike(self, module: nn.Module, batches: Batches) -> bool:
        for batch, tolerance in batches:
            expected = _expected(module, self._called, batch)
            if expected is None:
                continue
            found = self._session.run(*[each.numpy() for each in batch])
            if max(map(difference, expected, found), default=0.0) > tolerance:
                return False
        return True


def _called(call: Callable[..., Any], module: nn.Module, inputs: tuple[Any, ...]) -> Any:
    try:
        with EXPORTING, torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what torch copies
            # A module may take parts out of a dict.
            return call(evaluating(module), *copy.deepcopy(inputs))
    except ConfigurationError:
        raise
    except Exception as error:  # a module's own code may raise anything
        raise ConfigurationError(
            f"{type(module).__name__} cannot be run with two rows: {error}"
        ) from error


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


def _constants(module: nn.Module) -> list[tuple[Any, ...]]:
    """Return the values of a module that are constants of its graph, so that changes can be seen.

    A tensor counts its changes; it is kept, so that no other one gets its id.
    """
    found: list[tuple[Any, ...]] = []
    for part in module.modules():
        own = vars(part)
        apart = [(name, part._buffers[name]) for name in own.get("_non_persistent_buffers_set", ())]
        for name, value in (*own.items(), *apart):
            if isinstance(value, dict | set) or value is None:
                continue  # the most of them
            if isinstance(value, torch.Tensor):
                count = 0 if value.is_inference() else value._version
                found.append((name, id(value), count, value))
            elif isinstance(value, int | float | np.generic) and name != "training":
                found.append((name, value))
    return found


def _is_not_finite(array: NDArray[Any]) -> bool:
    return array.dtype.kind == "f" and not np.isfinite(array).all()


def _expected(
    module: nn.Module, forward: Forward, batch: Sequence[torch.Tensor]
) -> list[NDArray[Any]] | None:
    """Return torch's outputs; None: the module's own code refuses what was drawn."""
    try:
        with torch.no_grad():
            return [each.numpy() for each in forward(module, *batch)]
    except Exception:  # noqa: BLE001  # it may raise anything
        return None


def _positive(examples: Sequence[torch.Tensor]) -> Batches:
    yield [each[:2] for each in examples], TOLERANCE
    yield [torch.cat([each, each])[:3] for each in examples], TOLERANCE
    generator = torch.Generator().manual_seed(1)
    for size in (1.0, 1e-2, 1e-4):
        yield [_drawn(each, 0.0, size, generator) for each in examples], TOLERANCE


def _signed(examples: Sequence[torch.Tensor]) -> Batches:
    generator = torch.Generator().manual_seed(2)
    for size, tolerance in ((1.0, TOLERANCE), (100.0, 1e-3)):
        yield [_drawn(each, -size, size, generator) for each in examples], tolerance


def _drawn(like: torch.Tensor, low: float, high: float, generator: torch.Generator) -> torch.Tensor:
    shape = (3, *like.shape[1:])
    if like.is_floating_point():
        return (low + (high - low) * torch.rand(shape, generator=generator)).to(like.dtype)
    # Integers often are indices: none is above 1, and none below 0 unless that has to be tried.
    least = 0 if like.dtype in (torch.bool, torch.uint8) else min(0, math.floor(low))
    return torch.randint(least, 2, shape, generator=generator).to(like.dtype)


def _two_rows(leaf: torch.Tensor) -> torch.Tensor:
    return torch.cat([leaf[:1], leaf[:1]])


# --- whether a module runs in torch or compiled: the option inference -----------------------------


class InferenceChoice:
    """Runs a module in torch or compiled, and says why.

    Args:
        inference: ``"torch"``; ``"compiled"``, which raises where that is impossible; or
            ``"auto"``: compiled where that is possible.
        compile: Makes a ``CompiledForward``, from an example of its batch. It raises
            ConfigurationError with the reason where that is impossible, or where the compiled
            module computes something else.
        device: Torch's type of the module's device. Only on a CPU ``compile`` is used; elsewhere
            the caller has torch compile the module, for ``"compiled"`` alone.
    """

    def __init__(self, inference: str, compile: Callable[..., Any], device: str = "cpu") -> None:
        self._inference = self._asked = inference
        self._compile, self._device = compile, device
        self._compiled: Any | None = None
        # Contracts are checked in several threads.
        self._lock = threading.Lock()
        self._reason: str | None = "the first batch decides"
        self._left_to_torch: str | None = None
        self.refusal = ""
        """Why compiling, which had to be done, failed, with the remedy; empty: it did not."""
        if inference == "torch":
            self._fall_back('inference="torch" says so')
        elif device != "cpu" and inference == "auto":
            self._fall_back(f'inference="auto" is torch on {device}')
        elif device != "cpu":
            self._inference = "torch"
            self._take()

    def __reduce__(self) -> tuple[Any, ...]:
        return InferenceChoice, (self._asked, self._compile, self._device)

    def torch_reason(self) -> str | None:
        """Why the module runs in torch, or ran the last batch there; None: it runs compiled."""
        return self._reason or self._left_to_torch

    def load(self) -> None:
        """Take the module's weights as they are now; to be called after each change of them.

        Raises:
            ConfigurationError: As ``prepare``; the next batch compiles anew.
        """
        with self._lock:  # or a module that is just being compiled would keep the former ones
            self.refusal = ""
            if self._compiled is not None:
                try:
                    self._compiled.load()
                except Exception as error:  # noqa: BLE001  # ONNX Runtime's have no base class
                    self._refuse(error)  # else the former weights would act

    def prepare(self, *batch: Any) -> None:
        """Compile, unless that has been done or tried.

        Args:
            batch: An example of a batch.

        Raises:
            ConfigurationError: It is impossible, and ``inference`` is ``"compiled"``.
        """
        with self._lock:
            if self._compiled is not None or self._inference == "torch":
                return
            try:
                self._compiled = self._compile(*batch)
            except Exception as error:  # noqa: BLE001  # as above
                self._refuse(error, is_final=True)
                return
            self.refusal = ""
            self._take()

    def run(self, in_torch: Callable[..., Any], *batch: Any) -> Any:
        """Return the module's outputs for a batch.

        Args:
            in_torch: Runs the module in torch.
            batch: The batch.

        Raises:
            ConfigurationError: As ``prepare``, which is not tried again before ``load``.
        """
        if self._compiled is None and self._inference != "torch":
            if self.refusal:
                raise ConfigurationError(self.refusal)
            self.prepare(*batch)
        compiled = self._compiled
        if compiled is None:
            return in_torch(*batch)
        found = None
        try:
            found = compiled.run(*batch)
            self._left_to_torch = _LEFT_TO_TORCH if found is None else None
        except ConfigurationError as error:
            self._refuse(error)
        except Exception as error:  # noqa: BLE001  # as above; torch says what is wrong with it
            self._left_to_torch = _unexpected(error)
        return in_torch(*batch) if found is None else found

    def _take(self) -> None:
        self._reason = None
        _LOG.info("the module runs compiled")

    def _refuse(self, error: Exception, *, is_final: bool = False) -> None:
        reason = str(error) if isinstance(error, ConfigurationError) else _unexpected(error)
        if self._inference == "compiled":
            refusal = f'inference="compiled" is impossible: {reason}; use "auto" or "torch"'
            self._compiled, self._reason = None, refusal
            self.refusal = refusal if is_final else ""
            raise ConfigurationError(refusal) from error
        self._fall_back(reason)

    def _fall_back(self, reason: str) -> None:
        self._inference, self._compiled, self._reason = "torch", None, reason
        _LOG.info("the module runs in torch: %s", reason)


def _unexpected(error: Exception) -> str:
    (reason, *_) = str(error).splitlines() or [""]
    return f"it fails in ONNX Runtime: {type(error).__name__}: {reason}"
