"""The RLlib plug-in."""

from rlmesh_ray.dialects.rllink.runner.configure import configure_rllink
from rlmesh_ray.dialects.rllink.runner.env_runner import RLMeshRLlinkEnvRunner
from rlmesh_ray.rllib.config.configure import configure
from rlmesh_ray.rllib.runner.env_runner import RLMeshEnvRunner
from rlmesh_ray.rllib.runner.multi_agent_env_runner import RLMeshMultiAgentEnvRunner
from rlmesh_ray.rllib.weights.publisher import WeightPublisher, publish_weights

__all__ = [
    "RLMeshEnvRunner",
    "RLMeshMultiAgentEnvRunner",
    "RLMeshRLlinkEnvRunner",
    "WeightPublisher",
    "configure",
    "configure_rllink",
    "publish_weights",
]
