"""Episodes that a failure of an endpoint or an environment has ended."""

from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

INTERRUPTED_KEY = "rlmesh_ray.interrupted"
"""In the last info of an episode that a failure has cut short: the cause, in words."""


def truncate(episode: SingleAgentEpisode, cause: Exception | str) -> None:
    """End an episode where it stands, as truncated: what it holds has happened.

    The step that was on its way when the endpoint failed is no part of it.

    Args:
        episode: Has been reset, and is not done.
        cause: Goes into the last info, in words.
    """
    episode.is_truncated = True
    episode.infos.data[-1] = {**episode.infos.data[-1], INTERRUPTED_KEY: str(cause)}


def truncate_agents(episode: MultiAgentEpisode, cause: Exception | str) -> None:
    """Do the same with all agents of an episode that have not ended.

    An agent that acted and was waiting for its next observation keeps the steps before: what
    became of that action nobody knows.

    Args:
        episode: Has been reset, is not done and has not been converted to NumPy.
        cause: Goes into the last infos, in words.
    """
    episode.is_truncated = True
    for agent, own in episode.agent_episodes.items():
        if not own.is_done:
            truncate(own, cause)
            episode._del_hanging(agent)
