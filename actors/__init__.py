"""Ray actors that host rlmesh services, and how to find them.

The names below load on first use: each actor is a process that imports this package, and a registry
must not pay for servers, nor an endpoint for evaluations.

This folder is the package ``rlmesh_ray.actors``. Importing it under any other
name would create a second copy of every class in it.
"""

if __name__ != "rlmesh_ray.actors":
    raise ImportError(f"import rlmesh_ray.actors, not {__name__}")

import importlib.util
from importlib import import_module
from typing import TYPE_CHECKING

from rlmesh_ray.errors import MissingPackageError, install_command

if TYPE_CHECKING:
    from rlmesh_ray.actors.env_actor import EnvServiceActor
    from rlmesh_ray.actors.env_fleet import EnvFleet
    from rlmesh_ray.actors.evaluation import evaluate_on_ray
    from rlmesh_ray.actors.gateway import Gateway
    from rlmesh_ray.actors.model_actor import ModelServiceActor
    from rlmesh_ray.actors.model_fleet import ModelFleet, NamedModelFleet
    from rlmesh_ray.actors.pool import EnvPool

if importlib.util.find_spec("ray") is None:
    raise MissingPackageError(
        f"rlmesh_ray.actors needs Ray, and ray is not installed: {install_command('rllib')}"
    )

_HOMES = {
    "EnvFleet": "rlmesh_ray.actors.env_fleet",
    "EnvPool": "rlmesh_ray.actors.pool",
    "EnvServiceActor": "rlmesh_ray.actors.env_actor",
    "Gateway": "rlmesh_ray.actors.gateway",
    "ModelFleet": "rlmesh_ray.actors.model_fleet",
    "ModelServiceActor": "rlmesh_ray.actors.model_actor",
    "NamedModelFleet": "rlmesh_ray.actors.model_fleet",
    "evaluate_on_ray": "rlmesh_ray.actors.evaluation",
}

__all__ = [
    "EnvFleet",
    "EnvPool",
    "EnvServiceActor",
    "Gateway",
    "ModelFleet",
    "ModelServiceActor",
    "NamedModelFleet",
    "evaluate_on_ray",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
