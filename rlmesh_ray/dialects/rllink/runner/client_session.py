"""One simulator's conversation: its episodes, and the actions that it asks for one by one."""

import copy
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from ray.rllib.connectors.module_to_env.get_actions import GetActions
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.utils.spaces.space_utils import (
    clip_action,
    get_base_struct_from_space,
    unsquash_action,
)

from rlmesh_ray.dialects.rllink import wire as m
from rlmesh_ray.dialects.rllink.runner.listen_plan import SampleSpaces
from rlmesh_ray.dialects.rllink.runner.sample_queue import (
    EpisodeProgress,
    ReceivedChunk,
    Rollout,
    SampleQueue,
    WeightsVersion,
)
from rlmesh_ray.dialects.rllink.server.connection import ImmediateOrLaterReply
from rlmesh_ray.errors import RemoteProtocolError
from rlmesh_ray.models.rllib.fast_path import ActionSampler, as_arrays

_MOST_ROWS = 1024
_KEPT = (Columns.ACTIONS, *m.MODEL_OUTPUTS)
_MOST_EPISODES = 1024
"""That one client may have running at a time."""
_UNKNOWN = -1
"""Number of the weights of a client that was never given any."""


class ChosenAction(NamedTuple):
    """What was chosen for an observation, and what the policy thought of it."""

    action: m.Array
    outputs: dict[str, m.Array]
    seq_no: int
    """Of the weights that have chosen."""


class AskedEpisode:
    """An episode whose actions are asked for; everything happens under the queue's lock.

    Args:
        queue: Where its steps go.
        episode_id: The client's name for it.
    """

    obs: m.Array
    """The last one for which an action was asked."""
    answer: Future[m.Reply | None]
    """Gets the action for it."""

    def __init__(self, queue: SampleQueue, episode_id: str) -> None:
        self.episode_id = episode_id
        self._queue = queue
        self._progress = EpisodeProgress(comes_by_step=True)
        self._rollout = Rollout()
        self._chosen: ChosenAction | None = None
        """The action whose outcome is not known yet."""
        self.reward = 0.0
        """Since the last action."""
        self._is_over = False

    def ask(self, obs: m.Array) -> Future[m.Reply | None]:
        self._complete(obs, is_terminated=False, is_truncated=False)
        self.obs, self.answer = obs, Future()
        return self.answer

    def choose(self, chosen: ChosenAction) -> None:
        """Note the action for the last observation; ignored if the episode is over."""
        if not self._is_over:
            self._chosen = chosen
            self._queue.begin_rollout(self._rollout, 1, chosen.seq_no)

    def end(self, obs: m.Array, *, is_truncated: bool) -> None:
        self._complete(obs, is_terminated=not is_truncated, is_truncated=is_truncated)
        self._is_over = True
        if self._progress.num_steps:
            self._queue.finish(self._progress)

    def abandon(self) -> None:
        self._is_over = True
        self._queue.end_rollout(self._rollout)

    def _complete(self, obs: m.Array, *, is_terminated: bool, is_truncated: bool) -> None:
        chosen, self._chosen = self._chosen, None
        self._queue.end_rollout(self._rollout)
        if chosen is None:
            return
        chunk = m.Chunk(
            np.stack([self.obs, obs]),
            np.stack([chosen.action]),
            np.array([self.reward], np.float64),
            is_terminated,
            is_truncated,
            self.episode_id,
            {name: np.stack([value]) for name, value in chosen.outputs.items()},
        )
        self.reward = 0.0
        self._queue.add([self._progress.received(chunk, chosen.seq_no)])


def action_transform_for(
    action_space: gymnasium.Space[Any], *, normalize: bool, clip: bool
) -> Callable[[m.Array], m.Array]:
    """Return what RLlib does with a drawn action before the environment gets it.

    Args:
        action_space: What it must fit.
        normalize: ``config.normalize_actions``.
        clip: ``config.clip_actions``.
    """
    struct = get_base_struct_from_space(action_space)

    def fit(action: m.Array) -> m.Array:
        if normalize:
            action = unsquash_action(action, struct)
        elif clip:
            action = clip_action(action, struct)
        # RLlib's modules give a Box of shape () an axis.
        return np.asarray(action).reshape(action_space.shape)

    return fit


class ModuleCopy:
    """A copy of a module that acts with any version of the weights. For one thread.

    Args:
        module: Not changed.
    """

    def __init__(self, module: RLModule) -> None:
        self.module: Any = copy.deepcopy(module)
        self._seq_no: int | None = None

    def with_weights(self, weights: WeightsVersion) -> Any:
        if self._seq_no != weights.seq_no:
            self.module.set_state(dict(weights.state))
            self._seq_no = weights.seq_no
        return self.module


class BatchedInference:
    """A copy of the policy in a separate thread, so that it answers while others learn.

    The thread begins with the first question.

    Args:
        queue: Says when simulators may continue, and with which weights.
        module: For its form; not changed.
        fit: From ``action_transform_for``.
        explore: Whether actions are drawn.
    """

    def __init__(
        self,
        queue: SampleQueue,
        module: RLModule,
        fit: Callable[[m.Array], m.Array],
        *,
        explore: bool,
    ) -> None:
        self.explore = explore
        self._queue = queue
        self._copy = ModuleCopy(module)
        self._drawing = ActionSampler(self._copy.module, GetActions()._get_actions, explore=explore)
        self._fit = fit
        self._asked: list[AskedEpisode] = []
        self._thread: threading.Thread | None = None

    def submit(self, episode: AskedEpisode) -> None:
        """Have an episode's answer given when simulators may continue; under the queue's lock."""
        self._asked.append(episode)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rllink-acting", daemon=True)
            self._thread.start()
        self._queue.lock.notify_all()

    def _run(self) -> None:
        queue = self._queue
        while True:
            with queue.lock:
                while not queue.is_closed and not self._num_answerable:
                    queue.lock.wait()
                count = self._num_answerable
                asked, self._asked = self._asked[:count], self._asked[count:]
                weights = queue.weights
            if queue.is_closed or weights is None:
                for episode in (*asked, *self._asked):
                    episode.answer.cancel()
                return
            present = [each for each in asked if each.answer.set_running_or_notify_cancel()]
            if present:
                self._answer(present, weights)

    @property
    def _num_answerable(self) -> int:
        if not self._asked or self._queue.weights is None:
            return 0
        return min(len(self._asked), self._queue.room, _MOST_ROWS)

    def _answer(self, asked: Sequence[AskedEpisode], weights: WeightsVersion) -> None:
        try:
            choices = self._choose([episode.obs for episode in asked], weights)
            actions = [self._fit(chosen.action) for chosen in choices]
        except Exception as error:  # noqa: BLE001  # the module's own code; clients are told
            if len(asked) == 1:
                asked[0].answer.set_exception(error)
                return
            for episode in asked:  # only some of them may fail
                self._answer([episode], weights)
            return
        for episode, chosen, action in zip(asked, choices, actions, strict=True):
            with self._queue.lock:
                episode.choose(chosen)
            episode.answer.set_result(m.Action(episode.episode_id, action, chosen.seq_no))

    def _choose(self, obs: Sequence[m.Array], weights: WeightsVersion) -> list[ChosenAction]:
        module = self._copy.with_weights(weights)
        batch = {Columns.OBS: torch.as_tensor(np.stack(obs).astype(np.float32))}
        with torch.no_grad():
            if self.explore:
                output = module.forward_exploration(batch, t=weights.num_env_steps)
            else:
                output = module.forward_inference(batch)
            self._drawing.add_to(output)
        arrays = as_arrays({name: output[name] for name in _KEPT if name in output})
        kept = {name: arrays[name] for name in m.MODEL_OUTPUTS if name in arrays}
        outputs = kept if len(kept) == len(m.MODEL_OUTPUTS) else {}
        return [
            ChosenAction(
                arrays[Columns.ACTIONS][row],
                {name: values[row] for name, values in outputs.items()},
                weights.seq_no,
            )
            for row in range(len(obs))
        ]


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
        assert not isinstance(request, m.Ping), "the server answers it"
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
            self._queue.abandon(len(self._running) + len(self._asked))
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
            last_obs = progress.last_obs
            continues = last_obs is not None and np.array_equal(last_obs, chunk.obs[0])
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

    def _converse(
        self, request: m.StartEpisode | m.GetAction | m.LogReturns | m.EndEpisode
    ) -> ImmediateOrLaterReply:
        if isinstance(request, m.StartEpisode):
            return self._start(request.episode_id)
        episode = self._episode(request.episode_id)
        self._spaces.cast("reward", np.array(request.reward, np.float64))
        if isinstance(request, m.LogReturns):
            episode.reward += request.reward
            return None
        obs = self._spaces.cast("obs", request.obs)
        episode.reward += request.reward
        if isinstance(request, m.GetAction):
            answer = episode.ask(obs)
            self._inference.submit(episode)
            return answer
        episode.end(obs, is_truncated=request.is_truncated)
        del self._asked[request.episode_id]
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
