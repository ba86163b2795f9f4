"""Episodes whose actions are asked for one by one, put together on this side."""

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from rlmesh_ray.dialects.rllink.runner.sample_queue import (
    EpisodeProgress,
    ReceivedChunk,
    SampleQueue,
)
from rlmesh_ray.dialects.rllink.wire import messages as m


@dataclass(slots=True, eq=False)
class ChosenAction:
    """What was chosen for an observation, and what the policy thought of it."""

    obs: m.Array
    action: m.Array
    outputs: dict[str, m.Array]
    seq_no: int
    """Of the weights that have chosen."""


class EpisodeRecorder:
    """One episode; everything happens under the intake's lock.

    Args:
        queue: Where its steps go.
        episode_id: What the client calls it.
    """

    def __init__(self, queue: SampleQueue, episode_id: str) -> None:
        self.episode_id = episode_id
        self._queue = queue
        self._progress = EpisodeProgress()
        self._decisions: list[ChosenAction] = []
        self._rewards: list[float] = []
        self._pending: ChosenAction | None = None
        self._reward = 0.0
        self._last_obs: m.Array | None = None
        self._is_over = False
        queue.recorders.append(self)

    @property
    def is_acting(self) -> bool:
        """Whether an action was chosen, and it is not known yet what has come of it."""
        return self._pending is not None

    @property
    def num_kept(self) -> int:
        """How many steps are complete, and not handed over yet."""
        return len(self._decisions)

    def add_reward(self, reward: float) -> None:
        """Count a reward to the step that goes on."""
        self._reward += reward

    def see(self, obs: m.Array) -> None:
        """Take what the last action has led to: its step is complete."""
        self._complete(obs, is_terminated=False, is_truncated=False)

    def decide(self, decision: ChosenAction) -> None:
        """Note the action for the last observation; ignored if the episode is over."""
        if self._is_over:
            return
        self._pending = decision
        self._queue.begin_rollout(self, 1, decision.seq_no)

    def end(self, obs: m.Array, *, is_truncated: bool) -> None:
        """Take what the last action has led to, which is the end."""
        self._complete(obs, is_terminated=not is_truncated, is_truncated=is_truncated)
        if self._progress.num_steps:
            self._queue.finish(self._progress)
        self._leave()

    def abandon(self) -> None:
        """Hand over what there is: the client has gone."""
        self.flush()
        self._queue.end_rollout(self)
        self._leave()
        self._queue.abandon(1)

    def flush(self) -> None:
        """Hand the complete steps to the intake."""
        self._hand_over(is_terminated=False, is_truncated=False)

    def _leave(self) -> None:
        self._is_over = True
        self._queue.recorders.remove(self)

    def _complete(self, obs: m.Array, *, is_terminated: bool, is_truncated: bool) -> None:
        done, self._pending = self._pending, None
        self._queue.end_rollout(self)
        if done is not None:
            if self._decisions and self._decisions[-1].seq_no != done.seq_no:
                self.flush()
            self._decisions.append(done)
            self._rewards.append(self._reward)
            self._progress.return_ += self._reward
            self._progress.num_steps += 1
            self._reward = 0.0
        self._last_obs = obs
        if is_terminated or is_truncated:
            self._hand_over(is_terminated=is_terminated, is_truncated=is_truncated)
        elif done is not None and not self._queue.is_fresh(done.seq_no):
            self.flush()  # to be counted and dropped
        self._queue.lock.notify_all()

    def _hand_over(self, *, is_terminated: bool, is_truncated: bool) -> None:
        decisions, rewards = self._decisions, self._rewards
        if not decisions:
            return
        self._decisions, self._rewards = [], []
        assert self._last_obs is not None
        outputs = {
            name: np.stack([decision.outputs[name] for decision in decisions])
            for name in decisions[0].outputs
        }
        chunk = m.Chunk(
            np.stack([*(decision.obs for decision in decisions), self._last_obs]),
            np.stack([decision.action for decision in decisions]),
            np.array(rewards, np.float64),
            is_terminated,
            is_truncated,
            self.episode_id,
            outputs,
        )
        first_step = self._progress.num_steps - len(chunk)
        self._queue.add([ReceivedChunk(chunk, self._progress, first_step, decisions[0].seq_no)])


@dataclass(slots=True, eq=False)
class ActionRequest:
    """Which action a simulator shall take."""

    recorder: EpisodeRecorder
    obs: m.Array
    future: Future[m.Reply | None] = field(default_factory=Future)
