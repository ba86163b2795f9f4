"""Whether a module runs only code of torch and RLlib, which never waits or loops without end."""

from collections.abc import Iterator
from typing import Any

import torch

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
