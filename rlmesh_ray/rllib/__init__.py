"""The RLlib plug-in."""

from rlmesh_ray.rllib.configure import configure
from rlmesh_ray.rllib.env_runner import RLMeshEnvRunner

__all__ = ["RLMeshEnvRunner", "configure"]
