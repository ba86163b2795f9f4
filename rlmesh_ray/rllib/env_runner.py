"""RLMeshEnvRunner: RLlib's SingleAgentEnvRunner, with its lanes behind endpoints."""

from rlmesh_ray.rllib.array_episodes import ArrayEpisodes
from rlmesh_ray.rllib.lane_env import LaneEnv
from rlmesh_ray.rllib.lane_group import LaneGroup
from rlmesh_ray.rllib.recording import RecordingEnvRunner


class RLMeshEnvRunner(RecordingEnvRunner, ArrayEpisodes):
    """Samples from endpoints whose lanes hold one agent each; failures are ``SlotRunner``'s matter.

    ``rlmesh_ray.rllib.configure`` puts it into an AlgorithmConfig. The episodes, connectors,
    callbacks and metrics are RLlib's own, and so are the files where ``offline_data(output=...)``
    is set.
    """

    group_class = LaneGroup
    env_class = LaneEnv
