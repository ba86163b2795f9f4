"""Resources of Ray's nodes and of actors, and whether an autoscaler may add nodes."""

import json
import os
from collections.abc import Mapping
from typing import Any

import ray
from ray._private import services
from ray._private.accelerators import get_accelerator_manager_for_resource
from ray._private.utils import get_num_cpus
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.experimental.internal_kv import _internal_kv_get

Resources = Mapping[str, float]
"""Amounts by Ray's names: "CPU", "GPU", "memory" (bytes), and custom resources."""

_NODE_GROUP_LABEL = "ray.io/node-group"
_STATUS_KEY = b"__autoscaling_status"
_ROUNDING = 1e-4  # Ray counts ten-thousandths


def needs_of(options: Mapping[str, Any]) -> dict[str, float]:
    """Return the resources that an actor with these options of Ray's needs."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    needs = {name: float(options.get(option) or 0.0) for name, option in named.items()}
    needs |= {name: float(amount) for name, amount in (options.get("resources") or {}).items()}
    return {name: amount for name, amount in needs.items() if amount > 0.0}


def fits(needs: Resources, node: Resources) -> bool:
    """Return whether a node with these resources has what an actor needs."""
    return all(node.get(name, 0.0) + _ROUNDING >= amount for name, amount in needs.items())


def node_resources() -> list[dict[str, float]]:
    """Return the total resources of each live node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def local_resources() -> dict[str, float] | None:
    """Return the resources of the Ray that this machine would start by itself.

    None: Ray would connect to a cluster that runs, whose resources are not known yet.
    """
    if os.environ.get("RAY_ADDRESS") or services.find_bootstrap_address(None):
        return None
    gpus = get_accelerator_manager_for_resource("GPU").get_current_node_num_accelerators()
    return {"CPU": float(get_num_cpus()), "GPU": float(gpus)}


def may_grow() -> bool:
    """Return whether nodes may be added automatically, by Ray's autoscaler or Kubernetes.

    Ray has no single flag for that. Launchers of several node types name the type in a label of
    each node; Ray's older autoscaler names it in its status only.
    """
    if any(_NODE_GROUP_LABEL in node.get("Labels", {}) for node in ray.nodes()):
        return True
    status = json.loads(_internal_kv_get(_STATUS_KEY) or b"{}")
    kinds = (status.get("autoscaler_report") or {}).get("active_nodes") or {}
    # Without node types, the status lists each node as a type of its own.
    ids = {f"node_{node['NodeID']}" for node in ray.nodes()}
    return not ids.issuperset(kinds)


def is_unplaced(needs: Resources) -> bool:
    """Return whether an actor with these needs waits for a node, as far as Ray knows."""
    if not any(fits(needs, node) for node in node_resources()):
        return True
    gcs_client = getattr(ray._private.worker.global_worker, "gcs_client", None)
    if gcs_client is None:  # a driver behind ray:// has none
        return not fits(needs, ray.available_resources())
    state = get_cluster_resource_state(gcs_client)
    pending = [dict(each.request.resources_bundle) for each in state.pending_resource_requests]
    return any(
        all(abs(bundle.get(name, 0.0) - amount) < _ROUNDING for name, amount in needs.items())
        for bundle in pending
    )
