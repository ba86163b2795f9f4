"""Running policies: the Policy protocol and its implementations.

The names below load on first use: other modules of this package need neither.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlmesh_ray.models.loading import load_policy
    from rlmesh_ray.models.onnx.policy_export import ExportProof, export_policy
    from rlmesh_ray.models.policy import Policy, PolicyTraits

_HOMES = {
    "ExportProof": "rlmesh_ray.models.onnx.policy_export",
    "Policy": "rlmesh_ray.models.policy",
    "PolicyTraits": "rlmesh_ray.models.policy",
    "export_policy": "rlmesh_ray.models.onnx.policy_export",
    "load_policy": "rlmesh_ray.models.loading",
}

__all__ = ["ExportProof", "Policy", "PolicyTraits", "export_policy", "load_policy"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
