"""Private and unstable parts of Ray.

``ray._private.services``, ``accelerators`` and ``utils`` tell what this machine has before Ray
runs. Without them resources that do not exist are refused when Ray has started.

``ray._private.state`` tells what is free on a node. Without it ``placement="near"`` leaves
endpoints where they are.

``ray.autoscaler.v2.sdk`` and the driver's GCS client tell what waits for a node. Without them an
actor counts as unplaced if the resources that are free do not suffice.

``ray.experimental.internal_kv`` has the status of Ray's older autoscaler. Without it a cluster that
could grow by that autoscaler counts as one that cannot.
"""

import importlib
import json
import os
from collections.abc import Mapping
from typing import Any

_STATUS_KEY = b"__autoscaling_status"


def _part(module: str, name: str) -> Any:
    """Return a name of one of Ray's modules; None: this Ray lacks it."""
    try:
        return getattr(importlib.import_module(f"ray.{module}"), name, None)
    except ImportError:
        return None


def own_resources() -> dict[str, float] | None:
    """Return the CPUs and GPUs of the Ray that this machine would start by itself.

    None: they are not known, or Ray would connect to a cluster that runs.
    """
    find_cluster = _part("_private.services", "find_bootstrap_address")
    accelerators = _part("_private.accelerators", "get_accelerator_manager_for_resource")
    num_cpus = _part("_private.utils", "get_num_cpus")
    if not (find_cluster and accelerators and num_cpus):
        return None
    if os.environ.get("RAY_ADDRESS") or find_cluster(None):
        return None
    num_gpus = accelerators("GPU").get_current_node_num_accelerators()
    return {"CPU": float(num_cpus()), "GPU": float(num_gpus)}


def free_resources(node_id: str) -> Mapping[str, float]:
    """Return what is free on a node, by Ray's names; empty: nothing, or that is not known."""
    by_node = _part("_private.state", "available_resources_per_node")
    return by_node().get(node_id, {}) if by_node else {}


def pending_bundles() -> list[dict[str, float]] | None:
    """Return the resources that actors and tasks wait for; None: they are not known."""
    worker = _part("_private.worker", "global_worker")
    gcs_client = getattr(worker, "gcs_client", None)  # a driver behind ray:// has none
    state_of = _part("autoscaler.v2.sdk", "get_cluster_resource_state")
    if gcs_client is None or state_of is None:
        return None
    requests = state_of(gcs_client).pending_resource_requests
    return [dict(each.request.resources_bundle) for each in requests]


def autoscaled_node_types() -> set[str]:
    """Return the node types in the status of Ray's older autoscaler; empty: it has none."""
    read = _part("experimental.internal_kv", "_internal_kv_get")
    status = json.loads(read(_STATUS_KEY) or b"{}") if read else {}
    return set((status.get("autoscaler_report") or {}).get("active_nodes") or {})
