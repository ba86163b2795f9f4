"""Truncation of episodes when an endpoint or an environment fails."""

from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rlmesh_ray.compat.rllib import forget_hanging

INTERRUPTED_KEY = "rlmesh_ray.interrupted"
"""Key in the last info of an episode that a failure has truncated: the cause, as text."""


def truncate(episode: SingleAgentEpisode, cause: Exception | str) -> None:
    """End an episode at its last step, as truncated.

    A step that was in flight when the endpoint failed is no part of it.

    Args:
        episode: An episode that has been reset and is not done.
        cause: Goes into the last info, as text.
    """
    episode.is_truncated = True
    episode.infos.data[-1] = {**episode.infos.data[-1], INTERRUPTED_KEY: str(cause)}


def truncate_agents(episode: MultiAgentEpisode, cause: Exception | str) -> None:
    """End all agents of an episode that have not ended, as truncated.

    An agent that acted and was waiting for its next observation keeps the steps before: the result
    of that action is unknown.

    Args:
        episode: An episode that has been reset, is not done and is not converted to NumPy.
        cause: Goes into the last infos, as text.
    """
    episode.is_truncated = True
    for agent, own in episode.agent_episodes.items():
        if not own.is_done:
            truncate(own, cause)
            forget_hanging(episode, agent)
