"""Torch modules: their device, weights, compilation, and whether they run known code only."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from rlmesh_ray.errors import ConfigurationError, PolicyError
from rlmesh_ray.models.actions import BatchBuckets
from rlmesh_ray.models.nesting import describe

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors of a module, each with its new value."""
# Torch's default limit of compiled versions of a function, beyond which it runs uncompiled.
_MOST_COMPILED_SIZES = 8
_KNOWN = ("torch.", "ray.rllib.")
# In TorchScript: nodes that may not end, and nodes that call code which is not checked here.
_UNKNOWN_KINDS = frozenset(
    {
        "prim::Loop",
        "prim::fork",
        "prim::CallFunction",
        "prim::CallMethod",
        "prim::PythonOp",
        "aten::wait",
    }
)
_SCRIPTED = ("forward", "initial_state")
# In programs of torch.export.
_KNOWN_TARGETS = ("torch._ops.aten", "_operator")


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


def padded(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Return so many rows: these, then zeros."""
    return torch.cat([rows, rows.new_zeros((size - len(rows), *rows.shape[1:]))])


# --- weights -------------------------------------------------------------------------------


def weights_of(module: torch.nn.Module) -> dict[str, Any]:
    """Copy the state dict: NumPy arrays, and tensors for dtypes that NumPy does not have."""
    return {name: _copy(tensor) for name, tensor in weight_tensors(module).items()}


def check_weights(
    module: torch.nn.Module, weights: object, *, optional: Collection[str] = ()
) -> Pairs:
    """Compare new weights with a module's own; nothing changes.

    Args:
        module: The module whose weights are to be replaced.
        weights: Name -> array or tensor, with the names, shapes and dtypes of the state dict.
        optional: Names that may be missing; their weights stay unchanged.

    Returns:
        The argument for ``replace_weights``.

    Raises:
        PolicyError: The names differ, or a shape or dtype does, or a tensor is no dense one that
            holds numbers (sparse, nested, on the meta device, ...).
    """
    if not isinstance(weights, Mapping):
        raise PolicyError(
            f"weights are a mapping of names to arrays, as state_dict() returns it, not a "
            f"{type(weights).__name__}"
        )
    tensors = weight_tensors(module)
    missing = sorted(tensors.keys() - weights.keys() - set(optional))
    unknown = sorted(map(str, weights.keys() - tensors.keys()))
    if missing or unknown:
        raise PolicyError(
            f"the weights are another module's: missing are {_some(missing)}, unknown are "
            f"{_some(unknown)}"
        )
    return [(tensors[name], _fitting(name, tensors[name], weights[name])) for name in weights]


def replace_weights(pairs: Pairs) -> None:
    """Copy new weights into the tensors that hold the old ones.

    In place: compiled code and captured graphs have the addresses of the tensors.
    """
    with torch.no_grad():
        for tensor, value in pairs:
            tensor.copy_(value)


def weight_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a module's state by name; buffers outside of it are constants."""
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
            f"weight {name} is {describe(value)}, but the module's is {describe(tensor)}; nothing "
            "has changed"
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


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5]) or "none"
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown


# --- code that never waits ------------------------------------------------------------------


def only_computes(module: torch.nn.Module, device: torch.device) -> bool:
    """Return whether a module's forward pass waits for nothing but this machine's processors.

    That holds for layers of torch and RLlib, nested in any way, without hooks or functions of other
    code, and for programs of TorchScript and torch.export without loops.

    Args:
        module: Any module, not compiled by torch.compile (which waits for a compiler).
        device: The module's device; False for any but the CPU, for which a pass would wait.
    """
    return device.type == "cpu" and _is_known_module(module)


def is_trusted(code: object) -> bool:
    return str(getattr(code, "__module__", "")).startswith(_KNOWN)


def _is_known_module(module: torch.nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return _is_known_script(module)
    if isinstance(module, torch.fx.GraphModule) and not _is_known_graph(module.graph):
        return False
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    # Such as a forward that replaces that of the class, or an activation.
    given = [value for value in vars(module).values() if callable(value)]
    return all(map(is_trusted, (type(module), *hooks, *given))) and all(
        map(_is_known_module, module.children())
    )


def _is_known_script(module: Any) -> bool:
    graphs = [getattr(module, name).inlined_graph for name in _SCRIPTED if hasattr(module, name)]
    return all(
        kind.startswith(("aten::", "prim::")) and kind not in _UNKNOWN_KINDS
        for graph in graphs
        for kind in _kinds(graph)
    )


def _kinds(block: Any) -> Iterator[str]:
    for node in block.nodes():
        yield node.kind()
        for inner in node.blocks():
            yield from _kinds(inner)


def _is_known_graph(graph: torch.fx.Graph) -> bool:
    return all(
        node.op in ("placeholder", "get_attr", "call_module", "output")
        or (
            node.op == "call_function"
            and getattr(node.target, "__module__", None) in _KNOWN_TARGETS
        )
        for node in graph.nodes
    )


# --- calling the layers of a sequential network directly, one after the other --------------------

# torch checks each part of a network for hooks. With small networks that takes longer than some of
# the layers.

Layer = Callable[[torch.Tensor], torch.Tensor]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# The hooks for all modules of the process. Where torch has other names for them, it is unknown
# whether there are any: the dict is not empty then.
_GLOBAL_HOOKS = tuple(getattr(torch_module, f"_global{name}", {0: None}) for name in _HOOKS)
# Layers that do the same in training and in evaluation mode, and have no state.
_LAYERS = (
    nn.Linear,
    nn.LayerNorm,
    nn.Identity,
    nn.ELU,
    nn.GELU,
    nn.LeakyReLU,
    nn.ReLU,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Tanh,
)


class SequentialFastPath:
    """Calls the layers of a sequential network, or the network itself while it has hooks.

    Args:
        network: A network that ``is_sequential``; its parts must not be replaced.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._layers = tuple(layers_in(network))
        self._hooks = hooks_on(network)

    def __call__(self, *inputs: Any) -> Any:
        if len(inputs) != 1 or any(self._hooks):
            return self._network(*inputs)
        (values,) = inputs
        for layer in self._layers:
            values = layer(values)
        return values

    def __reduce__(self) -> tuple[Any, ...]:
        return SequentialFastPath, (self._network,)


def layers_in(network: nn.Module) -> Iterator[Layer]:
    if isinstance(network, nn.Sequential):
        for part in network:
            yield from layers_in(part)
    elif isinstance(network, nn.Linear):
        yield _linear(network)
    elif isinstance(network, nn.Tanh):
        yield torch.tanh
    else:
        yield network.forward


def _linear(layer: nn.Linear) -> Layer:
    # torch looks up an attribute that is a parameter in three places, in Python.
    parameters, linear = layer._parameters, F.linear

    def call(values: torch.Tensor) -> torch.Tensor:
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:  # it is computed from other parameters now
            return layer.forward(values)
        return linear(values, weight, bias)  # type: ignore[arg-type]  # a weight is never None

    return call


def hooks_on(*networks: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the dicts of hooks that a pass through sequential networks would call.

    To be checked before each pass: a hook may be registered at any time.
    """
    own = (getattr(part, name) for one in networks for part in parts_of(one) for name in _HOOKS)
    return (*own, *_GLOBAL_HOOKS)


def parts_of(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the network and its parts, even if its class overrides ``modules``."""
    return nn.Module.modules(network)


def is_sequential(network: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Return whether calling the network only calls the ``forward`` of known classes in sequence.

    Args:
        network: The network.
        kinds: Known classes besides torch's own layers and Sequential.
    """
    known = (*_LAYERS, nn.Sequential, *kinds)
    return not any(_GLOBAL_HOOKS) and all(
        _is_known_layer(part, known) for part in parts_of(network)
    )


def _is_known_layer(part: nn.Module, known: tuple[type[nn.Module], ...]) -> bool:
    own = vars(part)
    return (
        type(part) in known
        and None not in part._modules.values()
        and not any(getattr(part, name, True) for name in _HOOKS)
        and "forward" not in own
        and "_forward" not in own
        and own.get("_compiled_call_impl") is None
    )
