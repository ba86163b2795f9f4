"""RLMeshMultiAgentEnvRunner: RLlib's MultiAgentEnvRunner, with its lanes behind endpoints."""

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.rllib.runner.multi_agent_env import MultiAgentRunnerEnv, MultiAgentSessionGroup
from rlmesh_ray.rllib.runner.multi_agent_episodes import MultiAgentEpisodes
from rlmesh_ray.rllib.runner.sample_recording import NO_SEVERAL_AGENTS


class RLMeshMultiAgentEnvRunner(MultiAgentEpisodes):
    """Samples from endpoints whose lanes hold several agents each; see ``SlotRunner`` for failures.

    ``rlmesh_ray.rllib.configure`` puts it into an AlgorithmConfig; which policy an agent is
    mapped to, the config's ``multi_agent`` says. The episodes, connectors, callbacks and metrics
    are RLlib's own.
    """

    group_class = MultiAgentSessionGroup
    env_class = MultiAgentRunnerEnv

    def make_env(self) -> None:
        """Open this runner's sessions; see ``SlotRunner``.

        Raises:
            ConfigurationError: Besides, the config wants to have recorded what is sampled.
        """
        if self.config.output:  # set after ``configure``, which refuses it, too
            raise ConfigurationError(NO_SEVERAL_AGENTS)
        super().make_env()
