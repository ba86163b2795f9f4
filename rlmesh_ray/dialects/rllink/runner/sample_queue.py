"""Where what simulators send meets what RLlib asks for; and when simulators must wait.

Two threads use the queue: the serving loop adds chunks and requests, the runner's thread takes
samples and publishes weights. Every method takes the one lock, briefly.

On-policy, a client that has sent steps continues only while the sample lacks steps that no other
client is making; otherwise its answer waits for the next sample, which mostly has newer weights.
So hardly a step is made with weights that are about to be replaced, and no sample waits for clients
that wait for it. A client that takes several times as long as before is no longer waited for.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from numpy.typing import NDArray

from rlmesh_ray.dialects.rllink import wire as m
from rlmesh_ray.models.onnx.onnx_export import OnnxGraph

_ANY = 2**62
_LOOK_S = 0.25
_FIRST_S = 5.0
"""How long a simulator is expected to bring its first steps."""
_LEAST_S, _TIMES = 1.0, 3.0
"""Later: so many times as long as it took last, and so long at least."""


@dataclass(slots=True, eq=False)
class WeightsVersion:
    """One version of a module's weights; the arrays are immutable."""

    seq_no: int
    state: Mapping[str, NDArray[Any]]
    extras: m.Extras
    """What else clients must know to act with them."""
    num_env_steps: int = 0
    """How many steps had been sampled by then: some modules explore accordingly."""
    _onnx: bytes = field(default=b"", repr=False)

    def onnx(self, model: OnnxGraph) -> bytes:
        """Return them as a model; made once, so one thread at a time may ask."""
        if not self._onnx:
            self._onnx = model.serialized(self.state)
        return self._onnx


MakeReply = Callable[[WeightsVersion], m.Reply | None]


@dataclass(slots=True, eq=False)
class EpisodeProgress:
    """An episode of a simulator."""

    episode_id: str | None = None
    """The client's name for it."""
    comes_by_step: bool = False
    """Whether its steps come one by one: they are joined when a sample takes them."""
    num_steps: int = 0
    """All that have arrived, of whichever weights."""
    return_: float = 0.0
    began_s: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    """How long it took; once it has ended."""
    last_obs: m.Array | None = None
    # What ``EpisodeChain`` has made of it; for the runner's thread.
    next_step: int = -1
    """That follows without a gap."""
    rllib_id: str = ""
    """Of RLlib's episode."""
    rllib_began: int = 0
    """The step with which that began."""
    tail: m.Chunk | None = None
    """The last steps, for episodes that look back."""

    def received(self, chunk: m.Chunk, seq_no: int) -> "ReceivedChunk":
        received = ReceivedChunk(chunk, self, self.num_steps, seq_no)
        self.num_steps += len(chunk)
        self.return_ += float(chunk.rewards.sum())
        self.last_obs = chunk.obs[-1]
        return received


class ReceivedChunk(NamedTuple):
    """A chunk, and where it belongs."""

    chunk: m.Chunk
    progress: EpisodeProgress
    first_step: int
    """Of the episode: how many have arrived before."""
    seq_no: int
    """Of the weights that have acted."""


@dataclass(slots=True, eq=False)
class Rollout:
    """The steps that one simulator, or one of its episodes, is making; see ``begin_rollout``."""

    num_steps: int = 0
    """How many are still to come."""
    seq_no: int = 0
    """Of the weights that act."""
    began_s: float = 0.0
    due_s: float = 0.0
    took_s: float | None = None
    """How long the last ones took."""


@dataclass(slots=True)
class SampleCounters:
    """What has happened since it was last asked for."""

    finished: list[EpisodeProgress] = field(default_factory=list)
    num_stale_steps: int = 0
    """Dropped, since the weights that acted were too old."""
    num_abandoned: int = 0
    """Episodes whose clients have gone."""


class _PendingReply(NamedTuple):
    future: Future[m.Reply | None]
    reply: MakeReply
    can_wait: bool


class SampleQueue:
    """Collects chunks until there are enough of them.

    Args:
        max_lag: How many versions old the weights may be that have acted; None: any.
        max_bytes: Limit of the chunks in the queue; clients wait beyond it.
        max_steps: Limit of their steps, unless a sample lacks more; not on-policy. None: none.
        clock: Tells the time, in seconds.
    """

    def __init__(
        self,
        *,
        max_lag: int | None,
        max_bytes: int,
        max_steps: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lock = threading.Condition()
        """For those who must do several things at once, and for waiting for any change."""
        self.weights: WeightsVersion | None = None
        """The present version; None before the first."""
        self.num_clients = 0
        self.is_closed = False
        self._max_lag = max_lag
        self._max_bytes = max_bytes
        self._max_steps = max_steps
        self._clock = clock
        self._kept: dict[int, WeightsVersion] = {}
        self._received: list[ReceivedChunk] = []
        self._num_steps = 0
        self._num_bytes = 0
        self._wanted: tuple[int | None, int | None] | None = None
        """Steps and episodes that a sample waits for."""
        self._waiting: list[_PendingReply] = []
        """In the order in which they were asked for."""
        self._rollouts: set[Rollout] = set()
        self._counters = SampleCounters()

    # --- the runner's side ---------------------------------------------------------------

    def publish(self, weights: WeightsVersion) -> None:
        """Let simulators act with these weights from now on; what is too old now is dropped."""
        with self.lock:
            self.weights = weights
            self._kept[weights.seq_no] = weights
            for seq_no in [each for each in self._kept if not self._is_kept(each)]:
                del self._kept[seq_no]
            self._refill(self._received)
            self._release()

    def take(
        self, *, num_steps: int | None, num_episodes: int | None, deadline_s: float
    ) -> list[ReceivedChunk]:
        """Wait for steps, or for the ends of episodes, and take what has come.

        Off-policy, no more steps are taken than were asked for: how often RLlib learns goes by
        how much it gets. Otherwise all are, since they would be stale the next time.

        Args:
            num_steps: How many; None: do not count them.
            num_episodes: Likewise.
            deadline_s: When to return what there is, by the queue's clock.
        """
        with self.lock:
            self._wanted = (num_steps, num_episodes)
            while not self._is_enough() and not self.is_closed:
                self._release()
                left_s = deadline_s - self._clock()
                if left_s <= 0:
                    break
                # Who is late is found by looking now and then.
                self.lock.wait(min(left_s, _LOOK_S))
            self._wanted = None
            taken, kept = self._received, list[ReceivedChunk]()
            if self._max_lag is None and num_steps is not None:
                taken, kept = _parted(taken, num_steps)
            self._refill(kept)
            # Off-policy, there is room again.
            self._release()
        return _joined(taken)

    def weights_of(self, seq_no: int) -> WeightsVersion | None:
        """Return a version of the weights, if it is not too old."""
        with self.lock:
            return self._kept.get(seq_no)

    def take_counters(self) -> SampleCounters:
        with self.lock:
            counters, self._counters = self._counters, SampleCounters()
        return counters

    def close(self) -> None:
        with self.lock:
            self.is_closed = True
            for each in self._waiting:
                each.future.cancel()
            self._waiting.clear()
            self.lock.notify_all()

    # --- the simulators' side ------------------------------------------------------------

    def add(self, received: Iterable[ReceivedChunk]) -> None:
        """Take chunks in; those of weights that are too old are counted and dropped."""
        with self.lock:
            for each in received:
                self._put(each)
            self.lock.notify_all()

    def reply_later(self, reply: MakeReply, *, can_wait: bool = True) -> Future[m.Reply | None]:
        """Return an answer that comes when the client may continue.

        Args:
            reply: Makes it of the weights of that moment.
            can_wait: Whether it waits until the client may continue; otherwise only until there are
                any weights.
        """
        pending = _PendingReply(Future(), reply, can_wait)
        with self.lock:
            self._waiting.append(pending)
            self._release()
        return pending.future

    def begin_rollout(self, rollout: Rollout, num_steps: int, seq_no: int) -> None:
        """Note that a simulator begins to make steps. Under the lock.

        If it begins again without having sent the steps before, its deadline stays as it was:
        the others would wait for as long as it requests weights and makes no step.
        """
        if rollout not in self._rollouts:
            took_s, rollout.began_s = rollout.took_s, self._clock()
            patience_s = _FIRST_S if took_s is None else max(_LEAST_S, _TIMES * took_s)
            rollout.due_s = rollout.began_s + patience_s
            self._rollouts.add(rollout)
        rollout.num_steps, rollout.seq_no = num_steps, seq_no

    def end_rollout(self, rollout: Rollout, num_steps: int | None = None) -> None:
        """Note that some of its steps have come, or that no more will (None). Under the lock."""
        rollout.num_steps -= rollout.num_steps if num_steps is None else num_steps
        if rollout.num_steps <= 0 and rollout in self._rollouts:
            self._rollouts.remove(rollout)
            rollout.took_s = self._clock() - rollout.began_s
            self.lock.notify_all()

    def finish(self, progress: EpisodeProgress) -> None:
        progress.seconds, progress.last_obs = time.monotonic() - progress.began_s, None
        with self.lock:
            self._counters.finished.append(progress)
            self.lock.notify_all()

    def abandon(self, num_episodes: int) -> None:
        with self.lock:
            self._counters.num_abandoned += num_episodes

    @property
    def is_full(self) -> bool:
        if self._num_bytes > self._max_bytes:
            return True
        if self._max_lag == 0 or self._max_steps is None:
            return False
        num_steps, num_episodes = self._wanted or (None, None)
        return num_episodes is None and self._num_steps >= max(self._max_steps, num_steps or 0)

    @property
    def room(self) -> int:
        """How many steps simulators may make now, besides those on their way; under the lock.

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
        return max(0, num_steps - self._num_steps - self.num_expected)

    @property
    def num_expected(self) -> int:
        """How many steps are on their way that can be counted on: fresh, and not yet overdue."""
        now_s = self._clock()
        return sum(
            rollout.num_steps
            for rollout in self._rollouts
            if now_s < rollout.due_s and self._is_fresh(rollout.seq_no)
        )

    # --- under the lock ------------------------------------------------------------------

    def _put(self, received: ReceivedChunk) -> None:
        chunk = received.chunk
        if not self._is_fresh(received.seq_no):
            self._counters.num_stale_steps += len(chunk)
            return
        self._received.append(received)
        self._num_steps += len(chunk)
        arrays = (chunk.obs, chunk.actions, chunk.rewards, *chunk.model_outputs.values())
        self._num_bytes += sum(array.nbytes for array in arrays)

    def _refill(self, received: Iterable[ReceivedChunk]) -> None:
        self._received, self._num_steps, self._num_bytes = [], 0, 0
        for each in received:
            self._put(each)

    def _is_fresh(self, seq_no: int) -> bool:
        if self._max_lag is None:
            return self.weights is not None and seq_no <= self.weights.seq_no
        # Numbers may be left out: what such weights have done could not be worked out.
        return seq_no in self._kept

    def _is_kept(self, seq_no: int) -> bool:
        assert self.weights is not None
        lag = self.weights.seq_no - seq_no
        return lag == 0 or (self._max_lag is not None and lag <= self._max_lag)

    def _is_enough(self) -> bool:
        if self._wanted is None:
            return False
        num_steps, num_episodes = self._wanted
        if num_episodes is not None:
            return sum(each.chunk.is_done for each in self._received) >= num_episodes
        return self._num_steps >= (num_steps or 0)

    def _release(self) -> None:
        self.lock.notify_all()
        if self.weights is None:
            return
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if each.future.cancelled():  # its client has gone meanwhile
                continue
            # Asked anew for each: the one before has taken of the room.
            if each.can_wait and not self.room:
                self._waiting.append(each)
            # False: its client has gone at this very moment.
            elif each.future.set_running_or_notify_cancel():
                try:
                    each.future.set_result(each.reply(self.weights))
                except Exception as error:  # noqa: BLE001  # its client is told, others continue
                    each.future.set_exception(error)


def _parted(
    received: Sequence[ReceivedChunk], num_steps: int
) -> tuple[list[ReceivedChunk], list[ReceivedChunk]]:
    """Return the first ``num_steps``, and the rest; a chunk may be cut in two."""
    taken = list[ReceivedChunk]()
    for number, each in enumerate(received):
        size = len(each.chunk)
        if size > num_steps:
            begin = each._replace(chunk=each.chunk.part(0, num_steps))
            end = each._replace(
                chunk=each.chunk.part(num_steps, size), first_step=each.first_step + num_steps
            )
            return [*taken, *([begin] if num_steps else [])], [end, *received[number + 1 :]]
        taken.append(each)
        num_steps -= size
    return taken, []


def _joined(received: Iterable[ReceivedChunk]) -> list[ReceivedChunk]:
    """Join the steps that have come one by one, of an episode and of the same weights."""
    groups: dict[object, list[ReceivedChunk]] = {}
    for each in received:
        key = (each.progress, each.seq_no) if each.progress.comes_by_step else id(each)
        groups.setdefault(key, []).append(each)
    return [
        first._replace(chunk=m.joined([each.chunk for each in group]))
        for first, group in ((group[0], group) for group in groups.values())
    ]
