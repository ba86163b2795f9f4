"""The RLlib plug-in."""

from rlmesh_ray.rllib.configure import configure
from rlmesh_ray.rllib.env_runner import RLMeshEnvRunner
from rlmesh_ray.rllib.multi_agent_env_runner import RLMeshMultiAgentEnvRunner
from rlmesh_ray.rllib.serving import ServeWeights, serve_latest

__all__ = [
    "RLMeshEnvRunner",
    "RLMeshMultiAgentEnvRunner",
    "ServeWeights",
    "configure",
    "serve_latest",
]
