"""The RLlib plug-in."""

from rlmesh_ray.rllib.configure import configure
from rlmesh_ray.rllib.env_runner import RLMeshEnvRunner
from rlmesh_ray.rllib.multi_agent_env_runner import RLMeshMultiAgentEnvRunner
from rlmesh_ray.rllib.rllink_configure import configure_rllink
from rlmesh_ray.rllib.rllink_env_runner import RLMeshRLlinkEnvRunner
from rlmesh_ray.rllib.serving import ServeWeights, serve_latest

__all__ = [
    "RLMeshEnvRunner",
    "RLMeshMultiAgentEnvRunner",
    "RLMeshRLlinkEnvRunner",
    "ServeWeights",
    "configure",
    "configure_rllink",
    "serve_latest",
]
