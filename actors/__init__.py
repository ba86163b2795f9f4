"""Ray actors that host rlmesh services, and how to find them.

This folder is the package ``rlmesh_ray.actors``. Importing it under any other
name would create a second copy of every class in it.
"""

if __name__ != "rlmesh_ray.actors":
    raise ImportError(f"import rlmesh_ray.actors, not {__name__}")

from rlmesh_ray.errors import INSTALL_RLLIB, MissingPackageError

try:
    from rlmesh_ray.actors.env_actor import EnvServiceActor
    from rlmesh_ray.actors.env_fleet import EnvFleet
    from rlmesh_ray.actors.evaluation import evaluate_on_ray
    from rlmesh_ray.actors.gateway import Gateway
    from rlmesh_ray.actors.model_actor import ModelServiceActor
    from rlmesh_ray.actors.model_fleet import ModelFleet
    from rlmesh_ray.actors.named_model_fleet import NamedModelFleet
    from rlmesh_ray.actors.pool import EnvPool
except ModuleNotFoundError as error:
    raise MissingPackageError(
        f"rlmesh_ray.actors needs Ray, and {error.name} is not installed: {INSTALL_RLLIB}"
    ) from error

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
