"""RLlib's EnvRunners as clients of trials: the history gets what they return."""

import warnings
from collections.abc import Iterator
from typing import Any

from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rlmesh_ray.errors import ConfigurationWarning
from rlmesh_ray.rllib import configure
from rlmesh_ray.rllib.runner.session_recovery import INTERRUPTED_KEY
from tests.chaos.hash_chain import Pair, joint_action
from tests.chaos.history import History

_NUM_STEPS = 16
"""Of one sample."""
_FAILURES = "num_env_step_failures", "num_episodes_interrupted_lifetime"


class RunnerClient:
    """A runner in this process, with several sessions; it recovers by itself.

    Args:
        place: The endpoint's address, or a fleet.
        history: Gets the episodes.
        is_multi_agent: Whether the endpoint serves a ``Pair``.
        lockstep: See ``configure``.
        num_sessions: How many the runner opens.
        num_lanes: Of each.
        timeout_s: Of a step.
    """

    def __init__(  # what a runner is made of
        self,
        place: Any,
        history: History,
        *,
        is_multi_agent: bool = False,
        lockstep: bool = False,
        num_sessions: int,
        num_lanes: int,
        timeout_s: float,
    ) -> None:
        self._episodes = EpisodeTeller(history)
        config = PPOConfig().env_runners(
            num_env_runners=0, num_envs_per_env_runner=num_sessions * num_lanes
        )
        if is_multi_agent:
            config = config.multi_agent(
                policies=set(Pair.possible_agents),
                policy_mapping_fn=lambda agent_id, *_args, **_kwargs: agent_id,
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConfigurationWarning)
            config = configure(
                config,
                place,
                lockstep=lockstep,
                step_timeout_s=timeout_s,
                reset_timeout_s=timeout_s,
            )
            self._runner = config.env_runner_cls(config=config, worker_index=0, num_workers=0)

    def advance(self) -> bool:
        """Sample a little; return whether that brought anything."""
        chunks = self._runner.sample(num_timesteps=_NUM_STEPS)
        for chunk in chunks:
            self._episodes.tell(chunk)
        return any(map(len, chunks))

    def failures(self) -> list[str]:
        """Return the names of the metrics that count what has broken, not what has moved."""
        metrics = self._runner.get_metrics()
        return [name for name in _FAILURES if metrics[name].peek()]

    def close(self) -> None:
        """Stop the runner."""
        self._runner.stop()


class EpisodeTeller:
    """Tells a history what is in episodes, whole ones or parts."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._seen: set[str] = set()
        """Episodes that have been returned in part."""

    def tell(self, chunk: SingleAgentEpisode | MultiAgentEpisode) -> None:
        """Tell it of an episode, or of more of one."""
        observations, actions, rewards = _parts(chunk)
        lane = chunk.id_
        if lane in self._seen:
            self._history.continued(lane, observations[0])
        else:
            self._seen.add(lane)
            self._history.began(lane, observations[0])
        cause = _interruption(chunk)
        for t, action in enumerate(actions):
            ends = chunk.is_done and not cause and t == len(actions) - 1
            self._history.stepped(
                lane,
                action,
                observations[t + 1],
                rewards[t],
                terminated=ends and chunk.is_terminated,
                truncated=ends and chunk.is_truncated,
            )
        if cause:
            self._history.lost(lane, cause)


def _parts(chunk: SingleAgentEpisode | MultiAgentEpisode) -> tuple[Any, list[int], list[float]]:
    """Return observations, actions and rewards of a chunk, of the chain that it is about."""
    if isinstance(chunk, SingleAgentEpisode):
        return chunk.get_observations(), [*map(int, chunk.get_actions())], [*chunk.get_rewards()]
    left, right = (chunk.agent_episodes[agent] for agent in Pair.possible_agents)
    actions = map(joint_action, left.get_actions(), right.get_actions())
    return left.get_observations(), [*actions], [*left.get_rewards()]


def _interruption(chunk: SingleAgentEpisode | MultiAgentEpisode) -> str:
    """Return why the episode was ended without its end; empty: it was not."""
    return next((str(info[INTERRUPTED_KEY]) for info in _last_infos(chunk)), "")


def _last_infos(chunk: SingleAgentEpisode | MultiAgentEpisode) -> Iterator[dict[str, Any]]:
    infos = chunk.get_infos(-1)
    nested = infos.values() if isinstance(chunk, MultiAgentEpisode) else [infos]
    yield from (info for info in nested if info and INTERRUPTED_KEY in info)
