"""One simulator's conversation: which episode a chunk belongs to, and what is answered."""

import uuid
from collections.abc import Callable

import numpy as np

from rlmesh_ray.dialects.rllink import wire as m
from rlmesh_ray.dialects.rllink.runner.batched_inference import AskedEpisode, BatchedInference
from rlmesh_ray.dialects.rllink.runner.sample_queue import (
    EpisodeProgress,
    ReceivedChunk,
    Rollout,
    SampleQueue,
    WeightsVersion,
)
from rlmesh_ray.dialects.rllink.runner.sample_validation import SampleSpaces
from rlmesh_ray.dialects.rllink.server.connection import ImmediateOrLaterReply
from rlmesh_ray.errors import RemoteProtocolError

_MOST_EPISODES = 1024
"""That one client may have running at a time."""
_UNKNOWN = -1
"""Number of the weights of a client that was never given any."""


class SimulatorSession:
    """A client of the port; called in the serving loop.

    Args:
        queue: Where its samples go.
        spaces: What they must fit.
        config: Answers GET_CONFIG.
        state: Makes of weights an answer that this client can read.
        inference: Chooses actions for it, if it asks.
    """

    def __init__(
        self,
        queue: SampleQueue,
        spaces: SampleSpaces,
        config: m.SetConfig,
        state: Callable[[WeightsVersion], m.SetState],
        inference: BatchedInference,
    ) -> None:
        self._queue = queue
        self._spaces = spaces
        self._config = config
        self._state = state
        self._inference = inference
        self._seq_no = _UNKNOWN
        self._running: list[EpisodeProgress] = []
        self._asked: dict[str, AskedEpisode] = {}
        self._rollout = Rollout()
        with queue.lock:
            queue.num_clients += 1
            queue.lock.notify_all()

    def receive(self, request: m.Request) -> ImmediateOrLaterReply:
        """Take a request; see ``rlmesh_ray.dialects.rllink.server.connection.ClientSession``.

        Raises:
            ConformanceError: A sample does not fit the spaces.
            RemoteProtocolError: The request does not fit what came before.
        """
        match request:
            case m.GetConfig():
                return self._config
            case m.GetState():
                return self._queue.reply_later(self._told, can_wait=False)
            case m.Episodes():
                return self._take(request)
            case _:
                with self._queue.lock:
                    return self._converse(request)

    def leave(self) -> None:
        with self._queue.lock:
            for episode in self._asked.values():
                episode.abandon()
            self._queue.abandon(len(self._running))
            self._queue.num_clients -= 1
            self._queue.end_rollout(self._rollout)
            self._queue.lock.notify_all()

    # --- whole episodes ------------------------------------------------------------------

    def _take(self, request: m.Episodes) -> ImmediateOrLaterReply:
        seq_no = self._seq_no if request.weights_seq_no is None else request.weights_seq_no
        # All of them first: a message is taken as a whole or not at all.
        chunks = [self._spaces.conformed(chunk) for chunk in request.chunks]
        with self._queue.lock:
            num_steps = None if request.wants_state else sum(map(len, chunks))
            self._queue.end_rollout(self._rollout, num_steps)
            received = [self._placed(chunk, seq_no) for chunk in chunks]
            self._queue.add(received)
            if received:
                self._give_up_others({each.progress for each in received})
        if request.wants_state:
            return self._queue.reply_later(self._told)
        if self._queue.is_full:
            return self._queue.reply_later(_nothing)
        return None

    def _placed(self, chunk: m.Chunk, seq_no: int) -> ReceivedChunk:
        progress = self._progress_of(chunk)
        received = progress.received(chunk, seq_no)
        if chunk.is_done:
            self._queue.finish(progress)
        else:
            self._running.append(progress)
        if len(self._running) + len(self._asked) > _MOST_EPISODES:
            raise RemoteProtocolError(
                f"more than {_MOST_EPISODES} episodes are running; end some, or open another "
                "connection"
            )
        return received

    def _progress_of(self, chunk: m.Chunk) -> EpisodeProgress:
        """Return the episode that a chunk continues, or a new one; it is taken off the list."""
        for progress in self._running:
            if progress.episode_id != chunk.episode_id:
                continue
            # Without an id, it is the one whose last observation comes again.
            continues = np.array_equal(progress.last_obs, chunk.obs[0])
            if continues or chunk.episode_id is not None:
                self._running.remove(progress)
                if continues:
                    return progress
                self._queue.abandon(1)
                break
        return EpisodeProgress(chunk.episode_id)

    def _give_up_others(self, present: set[EpisodeProgress]) -> None:
        going = [each for each in self._running if each.episode_id or each in present]
        self._queue.abandon(len(self._running) - len(going))
        self._running = going

    def _told(self, weights: WeightsVersion) -> m.SetState:
        told = self._state(weights)
        self._seq_no = weights.seq_no
        self._queue.begin_rollout(self._rollout, self._config.env_steps_per_sample, weights.seq_no)
        return told

    # --- one action after another --------------------------------------------------------

    def _converse(self, request: m.Request) -> ImmediateOrLaterReply:
        match request:
            case m.StartEpisode(wanted):
                return self._start(wanted)
            case m.GetAction(episode_id, obs, reward):
                episode = self._episode(episode_id)
                conformed = self._spaces.conformed_obs(obs[None], 1)[0]
                episode.add_reward(self._spaces.conformed_reward(reward))
                answer = episode.ask(conformed)
                self._inference.submit(episode)
                return answer
            case m.LogReturns(episode_id, reward):
                self._episode(episode_id).add_reward(self._spaces.conformed_reward(reward))
            case m.EndEpisode(episode_id, obs, reward, is_truncated):
                episode = self._episode(episode_id)
                last_obs = self._spaces.conformed_obs(obs[None], 1)[0]
                episode.add_reward(self._spaces.conformed_reward(reward))
                episode.end(last_obs, is_truncated=is_truncated)
                del self._asked[episode_id]
        return None

    def _start(self, wanted: str | None) -> m.EpisodeStarted:
        episode_id = wanted or uuid.uuid4().hex
        if episode_id in self._asked:
            raise RemoteProtocolError(f"episode {episode_id!r} is running already")
        if len(self._asked) >= _MOST_EPISODES:
            raise RemoteProtocolError(f"{_MOST_EPISODES} episodes are running; end some")
        self._asked[episode_id] = AskedEpisode(self._queue, episode_id)
        return m.EpisodeStarted(episode_id)

    def _episode(self, episode_id: str) -> AskedEpisode:
        episode = self._asked.get(episode_id)
        if episode is None:
            raise RemoteProtocolError(
                f"no episode {episode_id!r} is running; begin it with START_EPISODE"
            )
        return episode


def _nothing(_weights: WeightsVersion) -> None:
    """Answer a message that has no reply: the client may send more."""
