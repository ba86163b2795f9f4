"""Resources of Ray's nodes and of actors, and whether an autoscaler may add nodes."""

from collections.abc import Mapping
from typing import Any

import ray

from rlmesh_ray.compat.ray import autoscaled_node_types, pending_bundles

Resources = Mapping[str, float]
"""Amounts by Ray's names: "CPU", "GPU", "memory" (bytes), and custom resources."""

_NODE_GROUP_LABEL = "ray.io/node-group"
_ROUNDING = 1e-4  # Ray counts ten-thousandths


def needs_of(options: Mapping[str, Any]) -> dict[str, float]:
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    needs = {name: float(options.get(option) or 0.0) for name, option in named.items()}
    needs |= {name: float(amount) for name, amount in (options.get("resources") or {}).items()}
    return {name: amount for name, amount in needs.items() if amount > 0.0}


def fits(needs: Resources, node: Resources) -> bool:
    return all(node.get(name, 0.0) + _ROUNDING >= amount for name, amount in needs.items())


def node_resources() -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def may_grow() -> bool:
    """Return whether nodes may be added automatically, by Ray's autoscaler or Kubernetes.

    Ray has no single flag for that. Launchers of several node types name the type in a label of
    each node; Ray's older autoscaler names it in its status only.
    """
    if any(_NODE_GROUP_LABEL in node.get("Labels", {}) for node in ray.nodes()):
        return True
    # Without node types, the status lists each node as its own type.
    ids = {f"node_{node['NodeID']}" for node in ray.nodes()}
    return not ids.issuperset(autoscaled_node_types())


def is_unplaced(needs: Resources) -> bool:
    """Return whether an actor with these needs waits for a node, as far as Ray knows."""
    if not any(fits(needs, node) for node in node_resources()):
        return True
    pending = pending_bundles()
    if pending is None:
        return not fits(needs, ray.available_resources())
    return any(
        all(abs(bundle.get(name, 0.0) - amount) < _ROUNDING for name, amount in needs.items())
        for bundle in pending
    )
