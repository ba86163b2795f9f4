"""One simulator's conversation: which episode a chunk belongs to, and what is answered."""

import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import numpy as np

from rlmesh_ray.errors import RemoteProtocolError
from rlmesh_ray.rllib.rllink_intake import Intake
from rlmesh_ray.rllib.rllink_pool import Arrived, Progress
from rlmesh_ray.rllib.rllink_recorder import EpisodeRecorder, Question
from rlmesh_ray.rllib.rllink_spaces import SampleSpaces
from rlmesh_ray.rllib.rllink_weights import Weights
from rlmesh_ray.server.rllink import Answer
from rlmesh_ray.wire.rllink import messages as m

_MOST_EPISODES = 1024
"""That one client may have running at a time."""
_UNKNOWN = -1
"""Number of the weights of a client that was never given any."""


class Actor(Protocol):
    """Chooses actions for simulators that have no policy of their own."""

    def ask(self, question: Question) -> None:
        """Have a question answered, together with those of others; does not wait."""


class SimulatorVisit:
    """A client of the port; called in the serving loop.

    Args:
        intake: Where its samples go.
        spaces: What they must fit.
        config: Answers GET_CONFIG.
        state: Makes of weights an answer that this client can read.
        actor: Chooses actions for it, if it asks.
    """

    def __init__(
        self,
        intake: Intake,
        spaces: SampleSpaces,
        config: m.SetConfig,
        state: Callable[[Weights], m.SetState],
        actor: Actor,
    ) -> None:
        self._intake = intake
        self._spaces = spaces
        self._config = config
        self._state = state
        self._actor = actor
        self._seq_no = _UNKNOWN
        self._named: dict[str, Progress] = {}
        self._nameless: list[Progress] = []
        self._recorders: dict[str, EpisodeRecorder] = {}
        with intake.lock:
            intake.num_clients += 1
            intake.lock.notify_all()

    def receive(self, request: m.Request) -> Answer:
        """Take a request; see ``rlmesh_ray.server.rllink.Visit``.

        Raises:
            ConformanceError: A sample does not fit the spaces.
            RemoteProtocolError: The request does not fit what came before.
        """
        match request:
            case m.GetConfig():
                return self._config
            case m.GetState():
                return self._intake.answer_later(self._told, can_wait=False)
            case m.Episodes():
                return self._take(request)
            case _:
                with self._intake.lock:
                    return self._converse(request)

    def leave(self) -> None:
        """Forget its episodes: they will not go on."""
        with self._intake.lock:
            for recorder in self._recorders.values():
                recorder.abandon()
            self._intake.abandon(len(self._named) + len(self._nameless))
            self._intake.num_clients -= 1
            self._intake.come_back(self)
            self._intake.lock.notify_all()

    # --- whole episodes ------------------------------------------------------------------

    def _take(self, request: m.Episodes) -> Answer:
        seq_no = self._seq_no if request.weights_seq_no is None else request.weights_seq_no
        # All of them first: a message is taken as a whole or not at all.
        chunks = [self._spaces.conformed(chunk) for chunk in request.chunks]
        with self._intake.lock:
            if request.wants_state:
                self._intake.come_back(self)
            else:
                self._intake.bring(self, sum(map(len, chunks)))
            arrived = [self._placed(chunk, seq_no) for chunk in chunks]
            self._intake.add(arrived)
            if arrived:
                self._give_up_others({each.progress for each in arrived})
        if request.wants_state:
            return self._intake.answer_later(self._told)
        if self._intake.is_full:
            return self._intake.answer_later(_nothing)
        return None

    def _placed(self, chunk: m.Chunk, seq_no: int) -> Arrived:
        progress = self._progress_of(chunk)
        arrived = Arrived(chunk, progress, progress.num_steps, seq_no)
        progress.num_steps += len(chunk)
        progress.return_ += float(chunk.rewards.sum())
        progress.last_obs = chunk.obs[-1]
        if chunk.is_done:
            self._intake.finish(progress)
        elif chunk.episode_id is not None:
            self._named[chunk.episode_id] = progress
        else:
            self._nameless.append(progress)
        if len(self._named) + len(self._nameless) + len(self._recorders) > _MOST_EPISODES:
            raise RemoteProtocolError(
                f"more than {_MOST_EPISODES} episodes are running; end some, or open another "
                "connection"
            )
        return arrived

    def _progress_of(self, chunk: m.Chunk) -> Progress:
        """Return the episode that a chunk continues, or a new one; it is taken off the lists."""
        if chunk.episode_id is not None:
            known = self._named.pop(chunk.episode_id, None)
            if known is not None and _continues(known, chunk):
                return known
            self._intake.abandon(known is not None)
            return Progress()
        for number, progress in enumerate(self._nameless):
            if _continues(progress, chunk):
                return self._nameless.pop(number)
        return Progress()

    def _give_up_others(self, present: set[Progress]) -> None:
        """Forget the nameless episodes that a message has not gone on with."""
        going = [progress for progress in self._nameless if progress in present]
        self._intake.abandon(len(self._nameless) - len(going))
        self._nameless = going

    def _told(self, weights: Weights) -> m.SetState:
        told = self._state(weights)
        self._seq_no = weights.seq_no
        self._intake.set_out(self, self._config.env_steps_per_sample, weights.seq_no)
        return told

    # --- one action after another --------------------------------------------------------

    def _converse(self, request: m.Request) -> Answer:
        match request:
            case m.StartEpisode(wanted):
                return self._start(wanted)
            case m.GetAction(episode_id, obs, reward):
                return self._ask(self._recorder(episode_id), obs, reward)
            case m.LogReturns(episode_id, reward):
                self._recorder(episode_id).add_reward(self._spaces.conformed_reward(reward))
            case m.EndEpisode(episode_id, obs, reward, is_truncated):
                recorder = self._recorder(episode_id)
                last_obs = self._spaces.conformed_obs(obs[None], 1)[0]
                recorder.add_reward(self._spaces.conformed_reward(reward))
                recorder.end(last_obs, is_truncated=is_truncated)
                del self._recorders[episode_id]
        return None

    def _start(self, wanted: str | None) -> m.EpisodeStarted:
        episode_id = wanted or uuid.uuid4().hex
        if episode_id in self._recorders:
            raise RemoteProtocolError(f"episode {episode_id!r} is running already")
        if len(self._recorders) >= _MOST_EPISODES:
            raise RemoteProtocolError(f"{_MOST_EPISODES} episodes are running; end some")
        self._recorders[episode_id] = EpisodeRecorder(self._intake, episode_id)
        return m.EpisodeStarted(episode_id)

    def _ask(
        self, recorder: EpisodeRecorder, obs: m.Array, reward: float
    ) -> Future[m.Reply | None]:
        conformed = self._spaces.conformed_obs(obs[None], 1)[0]
        recorder.add_reward(self._spaces.conformed_reward(reward))
        recorder.see(conformed)
        question = Question(recorder, conformed)
        self._actor.ask(question)
        return question.future

    def _recorder(self, episode_id: str) -> EpisodeRecorder:
        recorder = self._recorders.get(episode_id)
        if recorder is None:
            raise RemoteProtocolError(
                f"no episode {episode_id!r} is running; begin it with START_EPISODE"
            )
        return recorder


def _continues(progress: Progress, chunk: m.Chunk) -> bool:
    return progress.last_obs is not None and np.array_equal(progress.last_obs, chunk.obs[0])


def _nothing(_weights: Weights) -> None:
    """Answer a message that has no reply: the client may send more."""
