"""evaluate: drive environments with a policy and count what it earns."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlmesh_ray.client.remote_model import RemoteModel, Slots
from rlmesh_ray.client.remote_vector_env import RemoteVectorEnv
from rlmesh_ray.errors import ConfigurationError

ActionFn = Callable[[Any], Any]
"""A batch of observations in, a batch of actions out."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One finished episode."""

    index: int
    seed: int | None
    episode_return: float
    length: int
    """Steps."""
    terminated: bool
    """False: truncated."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What a policy earned."""

    episodes: tuple[Episode, ...]
    """In the order of their indices."""
    wall_s: float

    @property
    def returns(self) -> list[float]:
        """Each episode's return."""
        return [episode.episode_return for episode in self.episodes]

    @property
    def lengths(self) -> list[int]:
        """Each episode's length in steps."""
        return [episode.length for episode in self.episodes]

    @property
    def return_mean(self) -> float:
        """Mean return."""
        return statistics.fmean(self.returns)

    @property
    def return_stderr(self) -> float:
        """Standard error of the mean return; nan for a single episode."""
        if len(self.episodes) < 2:
            return math.nan
        return statistics.stdev(self.returns) / math.sqrt(len(self.episodes))


def evaluate(
    env: str | RemoteVectorEnv,
    model: str | RemoteModel | ActionFn,
    *,
    episodes: int,
    seed: int | None = None,
    token: str | None = None,
    on_episode: Callable[[Episode], None] | None = None,
) -> EvaluationResult:
    """Run ``episodes`` episodes of ``env`` with the actions of ``model``.

    Episode i always starts with ``seed + i``, in whatever lane it runs, so that the result
    does not depend on the endpoint's width. Every started episode counts: a wide vector does
    not favour short episodes.

    Args:
        env: An endpoint's address, or an open RemoteVectorEnv (left open).
        model: A model endpoint's address, an open RemoteModel (left open), or a function.
        episodes: How many; at least 1.
        seed: Of the first episode; None lets the environment seed itself.
        token: For the addresses that are given; open what needs more (TLS, another edition text)
            yourself.
        on_episode: Called with each episode as it ends.

    Raises:
        ConfigurationError: ``episodes`` is less than 1.
        ContractMismatchError: The model cannot act in the environment.
        EndpointError: An endpoint cannot be reached, or its session broke.
        RemoteError: An endpoint answered with an error.
    """
    if episodes < 1:
        raise ConfigurationError(f"episodes={episodes} must be at least 1")
    lanes = RemoteVectorEnv(env, token=token) if isinstance(env, str) else env
    try:
        remote = RemoteModel(model, token=token) if isinstance(model, str) else model
        try:
            return _Evaluation(lanes, remote, episodes, seed, on_episode).run()
        finally:
            if isinstance(model, str) and isinstance(remote, RemoteModel):
                remote.close()
    finally:
        if isinstance(env, str):
            lanes.close()


class _Evaluation:
    """The evaluation loop; one lane runs one episode after the other."""

    def __init__(
        self,
        env: RemoteVectorEnv,
        model: RemoteModel | ActionFn,
        num_episodes: int,
        seed: int | None,
        on_episode: Callable[[Episode], None] | None,
    ) -> None:
        self._env = env
        self._model = model
        self._num_episodes = num_episodes
        self._seed = seed
        self._on_episode = on_episode
        self._done: list[Episode] = []
        width = env.num_envs
        # The episode that each lane runs; the lanes beyond the last one idle.
        self._index = np.arange(width)
        self._return = np.zeros(width)
        self._length = np.zeros(width, np.int64)

    def run(self) -> EvaluationResult:
        start_s = time.perf_counter()
        if isinstance(self._model, RemoteModel):
            self._model.configure_route(self._env)
        observation, _ = self._env.reset(seed=self._seeds(self._index))
        next_index = self._env.num_envs
        while len(self._done) < self._num_episodes:
            observation, reward, terminated, truncated, _ = self._env.step(self._act(observation))
            self._return += reward
            self._length += 1
            ended = terminated | truncated
            if ended.any():
                self._collect(ended, terminated)
                count = int(ended.sum())
                self._index[ended] = np.arange(next_index, next_index + count)
                next_index += count
                observation = self._restart(ended)
        if isinstance(self._model, RemoteModel):
            self._model.close_route()
        self._done.sort(key=lambda episode: episode.index)
        return EvaluationResult(tuple(self._done), time.perf_counter() - start_s)

    def _act(self, observation: Any) -> Any:
        if not isinstance(self._model, RemoteModel):
            return self._model(observation)
        slots = Slots(
            env_indices=range(self._env.num_envs),
            episode_ids=[f"episode-{index}" for index in self._index],
            steps=self._length.tolist(),
            resets=(self._length == 0).tolist(),
        )
        return self._model.predict(observation, slots=slots)

    def _collect(self, ended: Any, terminated: Any) -> None:
        for lane in np.flatnonzero(ended).tolist():
            index = int(self._index[lane])
            if index < self._num_episodes:
                episode = Episode(
                    index=index,
                    seed=None if self._seed is None else self._seed + index,
                    episode_return=float(self._return[lane]),
                    length=int(self._length[lane]),
                    terminated=bool(terminated[lane]),
                )
                self._done.append(episode)
                if self._on_episode is not None:
                    self._on_episode(episode)

    def _restart(self, ended: Any) -> Any:
        """Start the next episodes where one has ended; return all lanes' observations."""
        self._return[ended] = 0.0
        self._length[ended] = 0
        observation, _ = self._env.reset(
            seed=self._seeds(self._index), options={"reset_mask": ended}
        )
        return observation

    def _seeds(self, index: Any) -> list[int] | None:
        return None if self._seed is None else [self._seed + int(i) for i in index]
