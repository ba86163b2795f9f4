"""RLMeshEnvRunner: RLlib's SingleAgentEnvRunner, with its lanes behind endpoints."""

from rlmesh_ray.rllib.fast_path.array_episodes import ArrayEpisodes
from rlmesh_ray.rllib.runner.runner_env import RunnerEnv
from rlmesh_ray.rllib.runner.sample_recording import RecordingEnvRunner
from rlmesh_ray.rllib.runner.session_group import SessionGroup


class RLMeshEnvRunner(RecordingEnvRunner, ArrayEpisodes):
    """Samples from endpoints whose lanes hold one agent each; failures are ``SlotRunner``'s matter.

    ``rlmesh_ray.rllib.configure`` puts it into an AlgorithmConfig. The episodes, connectors,
    callbacks and metrics are RLlib's own, and so are the files where ``offline_data(output=...)``
    is set.
    """

    group_class = SessionGroup
    env_class = RunnerEnv
