"""Episode loop: the lanes of one session, each of which runs one episode after the other."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.client.remote_model import Slots
from rlmesh_ray.client.remote_vector_env import RemoteVectorEnv
from rlmesh_ray.evaluation.result import EpisodeResult, success_of
from rlmesh_ray.evaluation.seeds import seed_of
from rlmesh_ray.spaces.batch import flatten
from rlmesh_ray.spaces.validation import coerce_batch

if TYPE_CHECKING:
    from rlmesh_ray.recording.recorder import Recorder

Act = Callable[[Any, Callable[[], Slots]], Any]
"""Maps observations, and a function for their slots, to actions; one row a lane."""

_IDLE = -1


class EpisodeSource(Protocol):
    """Source of the episodes of one session's lanes."""

    @property
    def is_stopped(self) -> bool:
        """Whether the loop has to stop."""

    @property
    def num_waiting(self) -> int:
        """About how many episodes could be taken."""

    def begin(self) -> None:
        """Record that the first reset was answered."""

    def take(self, lanes: Sequence[int]) -> list[int | None]:
        """Assign an episode to each of ``lanes``, as far as there are any."""

    def finish(self, ended: Sequence[tuple[int, EpisodeResult]]) -> None:
        """Record the episodes that have ended, given with their lanes."""

    def await_work(self) -> bool:
        """Block until an episode can be taken; False at the end of the evaluation."""


class LaneLoop:
    """Runs episodes until there are none left.

    A lane without an episode is reset and stepped with the others, and does not count.

    Args:
        env: The session; episodes that its lanes run are dropped.
        act: The policy.
        episodes: Source of the episodes.
        seed: Seed of the episode with index 0; None lets the environment seed itself.
        model: Address of the policy, for the results.
        in_rounds: Whether lanes start together only, for an endpoint that resets all of them or
            none. Lanes that have ended are stepped along until the longest episode ends.
        recorder: Records the episodes; one that does not see them reset itself. None: they are not
            recorded.
    """

    def __init__(
        self,
        env: RemoteVectorEnv,
        act: Act,
        episodes: EpisodeSource,
        seed: int | None,
        model: str,
        *,
        in_rounds: bool = False,
        recorder: "Recorder | None" = None,
    ) -> None:
        self._recorder = recorder
        self._env = env
        self._act = act
        self._model = model
        self._episodes = episodes
        self._seed = seed
        self._in_rounds = in_rounds
        width = env.num_envs
        self._index: list[int] = [_IDLE] * width
        self._ids = [""] * width
        self._num_resets = 0
        self._returns = np.zeros(width)
        self._lengths = np.zeros(width, np.int64)

    def run(self) -> None:
        """Block until no episode is left, or ``episodes`` is stopped.

        Raises:
            RlmeshError: The environment or the policy failed; the running episodes are lost.
        """
        env, act, episodes, slots = self._env, self._act, self._episodes, self._slots
        returns, lengths = self._returns, self._lengths
        chosen = self._refill(np.ones(env.num_envs, np.bool_))
        if chosen is None:
            return
        observation = self._reset(chosen)
        episodes.begin()
        while not episodes.is_stopped:
            actions = act(observation, slots)
            observation, rewards, terminated, truncated, infos = env.step(actions)
            if self._recorder is not None:
                self._record(actions, observation, (rewards, terminated, truncated), infos)
            returns += rewards
            lengths += 1
            ended = terminated | truncated
            if ended.any():
                self._collect(ended, terminated, truncated, infos)
            elif not (episodes.num_waiting and _IDLE in self._index):
                continue
            chosen = self._refill(ended)
            if chosen is None:
                return
            if chosen.any():
                observation = self._reset(chosen)

    def _collect(
        self,
        ended: NDArray[np.bool_],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        infos: dict[str, Any],
    ) -> None:
        finished = []
        for lane in np.flatnonzero(ended).tolist():
            index = self._index[lane]
            self._index[lane] = _IDLE
            if index != _IDLE:
                episode = EpisodeResult(
                    index=index,
                    seed=seed_of(index, self._seed),
                    episode_return=float(self._returns[lane]),
                    length=int(self._lengths[lane]),
                    terminated=bool(terminated[lane]),
                    truncated=bool(truncated[lane]),
                    success=success_of(infos, lane),
                    endpoint=self._env.address,
                    model=self._model,
                )
                finished.append((lane, episode))
        self._episodes.finish(finished)

    def _refill(self, ended: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
        """Assign episodes to idle lanes; return a mask of lanes to reset, None at the end."""
        if self._in_rounds:
            if any(index != _IDLE for index in self._index):
                return np.zeros_like(ended)
            ended = np.ones_like(ended)
        while True:
            idle = [lane for lane, index in enumerate(self._index) if index == _IDLE]
            taken = self._episodes.take(idle)
            for lane, index in zip(idle, taken, strict=True):
                if index is not None:
                    self._index[lane] = index
                    ended[lane] = True
            if len(idle) < len(self._index) or any(index is not None for index in taken):
                return ended
            if not self._episodes.await_work():
                return None
            # A lane that has ended must be reset before the next step, also without an episode.
            ended = np.ones(len(self._index), np.bool_)

    def _reset(self, chosen: NDArray[np.bool_]) -> Any:
        """Reset the ``chosen`` lanes; return the observations of all lanes."""
        self._returns[chosen] = 0.0
        self._lengths[chosen] = 0
        for lane in np.flatnonzero(chosen).tolist():
            index = self._index[lane]
            self._num_resets += 1
            self._ids[lane] = f"idle-{self._num_resets}" if index == _IDLE else f"episode-{index}"
        options = None if chosen.all() else {"reset_mask": chosen}
        observation, infos = self._env.reset(seed=self._seeds(), options=options)
        if self._recorder is not None:
            lanes = [lane for lane in np.flatnonzero(chosen).tolist() if self._index[lane] != _IDLE]
            seeds = [seed_of(self._index[lane], self._seed) for lane in lanes]
            columns = flatten(self._env.contract.observation_space, observation)
            self._recorder.reset(lanes, seeds, columns, infos, self._env.render)
        return observation

    def _record(
        self,
        actions: Any,
        observation: Any,
        results: Sequence[NDArray[Any]],
        infos: dict[str, Any],
    ) -> None:
        assert self._recorder is not None, "called where there is one"
        contract = self._env.contract
        columns = flatten(contract.observation_space, observation)
        columns += coerce_batch(contract.action_space, actions, contract.num_envs)
        self._recorder.step([*columns, *results], infos, self._env.render)

    def _seeds(self) -> list[int | None] | None:
        if self._seed is None:
            return None
        return [seed_of(max(index, 0), self._seed) for index in self._index]

    def _slots(self) -> Slots:
        return Slots(
            env_indices=range(len(self._index)),
            episode_ids=self._ids.copy(),
            steps=self._lengths.tolist(),
            resets=(self._lengths == 0).tolist(),
        )
