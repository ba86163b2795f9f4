"""Where what simulators send meets what RLlib asks for; and when simulators must wait.

Two threads use it: the serving loop adds chunks and requests, the runner's thread takes samples and
publishes weights. Every method takes the one lock, briefly.

On-policy, a client that has sent steps goes on only while the sample lacks steps that no other
client is making; otherwise its answer waits for the next sample, which mostly has newer weights.
So hardly a step is made with weights that are about to be replaced, and no sample waits for clients
that wait for it. A client that takes several times as long as before is no longer waited for.
"""

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from rlmesh_ray.dialects.rllink.runner.chunk_queue import ChunkQueue, EpisodeProgress, ReceivedChunk
from rlmesh_ray.dialects.rllink.runner.inflight_steps import InflightSteps
from rlmesh_ray.dialects.rllink.runner.weights_version import WeightsVersion
from rlmesh_ray.dialects.rllink.wire import messages as m

MakeReply = Callable[[WeightsVersion], m.Reply | None]


@dataclass(slots=True, eq=False)
class _PendingReply:
    future: Future[m.Reply | None]
    reply: MakeReply
    can_wait: bool


class PendingReplies:
    """Answers that are still to be given, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._waiting: list[_PendingReply] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, reply: MakeReply, *, can_wait: bool) -> Future[m.Reply | None]:
        """Return an answer that comes with a later call of ``release``.

        Args:
            reply: Makes it of the weights of that moment.
            can_wait: Whether it waits for room, too.
        """
        waiting = _PendingReply(Future(), reply, can_wait)
        self._waiting.append(waiting)
        return waiting.future

    def release(self, weights: WeightsVersion, has_room: Callable[[], object]) -> None:
        """Answer those who may go on.

        Args:
            weights: The present ones.
            has_room: Whether one more may go on; asked anew for each, who takes of the room.
        """
        # The clients of some have gone meanwhile.
        waiting = [each for each in self._waiting if not each.future.cancelled()]
        self._waiting = []
        for each in waiting:
            if not each.can_wait or has_room():
                _resolve(each, weights)
            else:
                self._waiting.append(each)

    def cancel(self) -> None:
        """End all waiting."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.future.cancel()


def _resolve(waiting: _PendingReply, weights: WeightsVersion) -> None:
    # False: its client has gone at this very moment.
    if not waiting.future.set_running_or_notify_cancel():
        return
    try:
        waiting.future.set_result(waiting.reply(weights))
    except Exception as error:  # noqa: BLE001  # its client is told; the others go on
        waiting.future.set_exception(error)


__all__ = [
    "EpisodeProgress",
    "FinishedEpisode",
    "ReceivedChunk",
    "SampleCounters",
    "SampleQueue",
    "StepRecorder",
]

_ANY = 2**62
_LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class FinishedEpisode:
    """An episode that has ended, all of it."""

    num_steps: int
    return_: float
    seconds: float


@dataclass(frozen=True, slots=True)
class SampleCounters:
    """What has happened since it was last asked for."""

    finished: tuple[FinishedEpisode, ...]
    num_stale_steps: int
    """Dropped, since the weights that acted were too old."""
    num_abandoned: int
    """Episodes whose clients have gone."""
    num_clients: int
    """Connected now."""


class StepRecorder(Protocol):
    """Keeps steps of an episode that do not make a chunk yet; called under the intake's lock."""

    @property
    def num_kept(self) -> int:
        """How many steps."""

    def flush(self) -> None:
        """Hand them to the intake."""


class SampleQueue:
    """Collects chunks until there are enough of them.

    Args:
        max_lag: How many versions old the weights may be that have acted; None: any.
        max_bytes: Limit of the chunks in the queue; clients wait beyond it.
        max_steps: Limit of their steps, unless a sample lacks more; not on-policy. None: none.
    """

    def __init__(
        self, *, max_lag: int | None, max_bytes: int, max_steps: int | None = None
    ) -> None:
        self.lock = threading.Condition()
        """For those who must do several things at once, and for waiting for any change."""
        self.weights: WeightsVersion | None = None
        """The present version; None before the first."""
        self.recorders: list[StepRecorder] = []
        self.num_clients = 0
        self.is_closed = False
        self._max_lag = max_lag
        self._max_bytes = max_bytes
        self._max_steps = max_steps
        self._kept: dict[int, WeightsVersion] = {}
        self._chunks = ChunkQueue()
        self._wanted: tuple[int | None, int | None] | None = None
        self._waiting = PendingReplies()
        self.inflight = InflightSteps()
        self._finished: list[FinishedEpisode] = []
        self._num_stale_steps = 0
        self._num_abandoned = 0

    # --- the runner's side ---------------------------------------------------------------

    def publish(self, weights: WeightsVersion) -> None:
        """Let simulators act with these weights from now on; what is too old now is dropped."""
        with self.lock:
            for recorder in self.recorders:
                recorder.flush()
            self.weights = weights
            self._kept[weights.seq_no] = weights
            for seq_no in [each for each in self._kept if not self._is_kept(each)]:
                del self._kept[seq_no]
            for received in self._chunks.take():
                self._put(received)
            self._release()
            self.lock.notify_all()

    def take(
        self, *, num_steps: int | None, num_episodes: int | None, deadline_s: float
    ) -> list[ReceivedChunk]:
        """Wait for steps, or for the ends of episodes, and take what has come.

        Off-policy, no more steps are taken than were asked for: how often RLlib learns goes by
        how much it gets. Otherwise all are, since they would be stale the next time.

        Args:
            num_steps: How many; None: do not count them.
            num_episodes: Likewise.
            deadline_s: When to return what there is, as of ``time.monotonic``.
        """
        with self.lock:
            self._wanted = (num_steps, num_episodes)
            while not self._is_enough() and not self.is_closed:
                self._release()
                self.lock.notify_all()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                # Who is late is found by looking now and then.
                self.lock.wait(min(left_s, _LOOK_S))
            self._wanted = None
            for recorder in self.recorders:
                recorder.flush()
            taken = self._chunks.take(num_steps if self._max_lag is None else None)
            # Off-policy, there is room again.
            self._release()
            self.lock.notify_all()
        return taken

    def weights_of(self, seq_no: int) -> WeightsVersion | None:
        """Return a version of the weights, if it is not too old."""
        with self.lock:
            return self._kept.get(seq_no)

    def forget_samples(self) -> None:
        """Drop all samples in the queue."""
        with self.lock:
            for recorder in self.recorders:
                recorder.flush()
            self._chunks.take()
            self._release()
            self.lock.notify_all()

    def take_counters(self) -> SampleCounters:
        """Return what has happened since the last call."""
        with self.lock:
            counters = SampleCounters(
                tuple(self._finished),
                self._num_stale_steps,
                self._num_abandoned,
                self.num_clients,
            )
            self._finished, self._num_stale_steps, self._num_abandoned = [], 0, 0
        return counters

    def close(self) -> None:
        """End all waiting."""
        with self.lock:
            self.is_closed = True
            self._waiting.cancel()
            self.lock.notify_all()

    # --- the simulators' side ------------------------------------------------------------

    def add(self, received: Iterable[ReceivedChunk]) -> None:
        """Take chunks in; those of weights that are too old are counted and dropped."""
        with self.lock:
            for each in received:
                self._put(each)
            self.lock.notify_all()

    def reply_later(self, reply: MakeReply, *, can_wait: bool = True) -> Future[m.Reply | None]:
        """Return an answer that comes when the client may go on.

        Args:
            reply: Makes it of the weights of that moment.
            can_wait: Whether it waits until the client may go on; otherwise only until there are
                any weights.
        """
        with self.lock:
            answer = self._waiting.join(reply, can_wait=can_wait)
            self._release()
        return answer

    def begin_rollout(self, owner: object, num_steps: int, seq_no: int) -> None:
        """Note that a simulator begins to step; see ``InflightSteps.begin``. Under the lock."""
        self.inflight.begin(owner, num_steps, seq_no)

    def note_received(self, owner: object, num_steps: int) -> None:
        """Note that it has brought some of them; under the lock."""
        self.inflight.note_received(owner, num_steps)

    def end_rollout(self, owner: object) -> None:
        """Note that it has brought them, or never will; under the lock."""
        self.inflight.end(owner)
        self.lock.notify_all()

    def finish(self, progress: EpisodeProgress) -> None:
        """Note that an episode has ended."""
        seconds = time.monotonic() - progress.began_s
        with self.lock:
            self._finished.append(FinishedEpisode(progress.num_steps, progress.return_, seconds))
            self.lock.notify_all()

    def abandon(self, num_episodes: int) -> None:
        """Note that episodes will not go on, since their client has gone."""
        with self.lock:
            self._num_abandoned += num_episodes

    def is_fresh(self, seq_no: int) -> bool:
        """Tell whether what weights have done may be learnt from now."""
        if self._max_lag is None:
            return self.weights is not None and seq_no <= self.weights.seq_no
        # Numbers may be left out: what such weights have done could not be worked out.
        return seq_no in self._kept

    @property
    def is_full(self) -> bool:
        """Whether more has come than may wait."""
        if self._chunks.num_bytes > self._max_bytes:
            return True
        if self._max_lag == 0 or self._max_steps is None:
            return False
        num_steps, num_episodes = self._wanted or (None, None)
        return num_episodes is None and self._num_steps() >= max(self._max_steps, num_steps or 0)

    @property
    def room(self) -> int:
        """How many steps simulators may make now, beside those on their way; under the lock.

        Off-policy, and where whole episodes are waited for, as many as they like, until too many
        wait here.
        """
        if self.is_full:
            return 0
        if self._max_lag != 0:
            return _ANY
        if self._wanted is None or self._is_enough():
            return 0
        num_steps, _ = self._wanted
        if num_steps is None:
            return _ANY
        coming = self.inflight.num_expected(self.is_fresh)
        return max(0, num_steps - self._num_steps() - coming)

    # --- under the lock ------------------------------------------------------------------

    def _put(self, received: ReceivedChunk) -> None:
        if not self.is_fresh(received.seq_no):
            self._num_stale_steps += len(received.chunk)
            return
        self._chunks.put(received)

    def _is_kept(self, seq_no: int) -> bool:
        assert self.weights is not None
        lag = self.weights.seq_no - seq_no
        return lag == 0 or (self._max_lag is not None and lag <= self._max_lag)

    def _is_enough(self) -> bool:
        if self._wanted is None:
            return False
        num_steps, num_episodes = self._wanted
        if num_episodes is not None:
            return self._chunks.num_ends >= num_episodes
        return self._num_steps() >= (num_steps or 0)

    def _num_steps(self) -> int:
        return self._chunks.num_steps + sum(recorder.num_kept for recorder in self.recorders)

    def _release(self) -> None:
        """Answer those who may go on."""
        if self.weights is not None:
            self._waiting.release(self.weights, lambda: self.room)
