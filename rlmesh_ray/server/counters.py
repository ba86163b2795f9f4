"""The counters behind an endpoint's statistics.

The serving loop counts, and for a policy the thread that runs its batches; statistics may be read
from any thread. Counters that must change together are changed and summed up under a lock.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from rlmesh_ray import __version__
from rlmesh_ray.histogram import (
    BATCH_BOUNDS_ROWS,
    DURATION_BOUNDS_NS,
    NS_PER_S,
    HistogramCounter,
    histogram_of,
)
from rlmesh_ray.server.batch_queue import BatchQueueStatistics
from rlmesh_ray.server.statistics import EnvStatistics, ModelStatistics, SessionStatistics
from rlmesh_ray.transport.session_progress import SessionProgress


class SessionCounters:
    """Counts the sessions of an endpoint, and the errors of their requests."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._open = self._opened = self._refused = self._lost = 0
        self._errors: Counter[str] = Counter()

    @property
    def uptime_s(self) -> float:
        """Seconds since this was made."""
        return time.monotonic() - self._started_s

    @property
    def num_open(self) -> int:
        """Sessions that have begun and not ended."""
        return self._open

    def note_opened(self) -> None:
        """Count a session that begins."""
        self._opened += 1
        self._open += 1

    def note_ended(self) -> None:
        """Count one that has ended."""
        self._open -= 1

    def note_refused(self) -> None:
        """Count one that was refused because the endpoint was full."""
        self._refused += 1

    def note_lost(self) -> None:
        """Count one that ended without Close."""
        self._lost += 1

    def note_error(self, code: str) -> None:
        """Count an error that a request was answered with."""
        self._errors[code] += 1

    def sessions(self) -> SessionStatistics:
        """Return the counts of sessions."""
        return SessionStatistics(self._open, self._opened, self._refused, self._lost)

    def errors(self) -> dict[str, int]:
        """Return the counts of errors by code."""
        return dict(self._errors)


class LaneCounters:
    """Counts what the lanes of one session do, from the progress that their worker records."""

    def __init__(self) -> None:
        self.resets = 0
        """Resets that succeeded."""
        self.transport = "grpc"
        """The present transport of its steps."""
        self._steps = HistogramCounter(DURATION_BOUNDS_NS)
        self._lane_steps = self._episodes = self._deviations = 0
        self._progress: SessionProgress | None = None

    @property
    def num_steps(self) -> int:
        """Vector steps up to now."""
        return self.read().num_steps

    def attach(self, progress: SessionProgress) -> None:
        """Read a worker's progress from now on, until ``detach``."""
        self.detach()
        self._progress = progress

    def detach(self) -> None:
        """Keep the counts of the worker, which is dead, or gets another session."""
        reading, self._progress = self.read(), None
        self._steps = HistogramCounter(DURATION_BOUNDS_NS)
        self._steps.merge(reading.steps)
        self._lane_steps, self._episodes = reading.lane_steps, reading.episodes
        self._deviations = reading.deviations

    def read(self) -> "LaneTotals":
        """Return the counts up to now."""
        progress = self._progress
        if progress is None:
            steps = self._steps.read()
            return LaneTotals(steps, self._lane_steps, self._episodes, self._deviations)
        pairs = zip(self._steps.read(), progress.steps.read(), strict=True)
        return LaneTotals(
            tuple(one + other for one, other in pairs),
            self._lane_steps + progress.num_lane_steps,
            self._episodes + progress.num_ended,
            self._deviations + progress.num_deviations,
        )


@dataclass(frozen=True, slots=True)
class LaneTotals:
    """The counts of one session's lanes."""

    steps: tuple[int, ...]
    """Vector steps by duration, as ``HistogramCounter.read`` returns them."""
    lane_steps: int
    episodes: int
    """Episodes that were seen to end."""
    deviations: int
    """Values out of range, and episodes that such a value has truncated."""

    @property
    def num_steps(self) -> int:
        """Vector steps."""
        return sum(self.steps[:-1])


class EnvCounters:
    """Counts what an environment endpoint does."""

    def __init__(self) -> None:
        self.sessions = SessionCounters()
        """Its sessions."""
        self._lock = threading.Lock()
        self._running: set[LaneCounters] = set()
        self._steps = HistogramCounter(DURATION_BOUNDS_NS)
        self._lane_steps = self._resets = self._episodes = self._worker_restarts = 0
        self._deviations = 0

    def open(self) -> LaneCounters:
        """Return the counters of a new session."""
        lanes = LaneCounters()
        with self._lock:
            self._running.add(lanes)
            self.sessions.note_opened()
        return lanes

    def close(self, lanes: LaneCounters) -> None:
        """Add a session's counts to the endpoint's; to be called once."""
        with self._lock:
            lanes.detach()
            reading = lanes.read()
            self._steps.merge(reading.steps)
            self._lane_steps += reading.lane_steps
            self._episodes += reading.episodes
            self._resets += lanes.resets
            self._deviations += reading.deviations
            self._running.discard(lanes)
            self.sessions.note_ended()

    def attach(self, lanes: LaneCounters, progress: SessionProgress) -> None:
        """See ``LaneCounters.attach``."""
        with self._lock:
            lanes.attach(progress)

    def note_worker_restart(self) -> None:
        """Count a worker process that takes the place of another within a session."""
        self._worker_restarts += 1

    def statistics(self) -> EnvStatistics:
        """Return the counters. From any thread."""
        with self._lock:
            readings = [lanes.read() for lanes in self._running]
            resets = self._resets + sum(lanes.resets for lanes in self._running)
            step_s = histogram_of(
                DURATION_BOUNDS_NS,
                [self._steps.read(), *(reading.steps for reading in readings)],
                NS_PER_S,
            )
            return EnvStatistics(
                version=__version__,
                uptime_s=self.sessions.uptime_s,
                sessions=self.sessions.sessions(),
                steps=step_s.count,
                lane_steps=self._lane_steps + sum(reading.lane_steps for reading in readings),
                resets=resets,
                episodes=self._episodes + sum(reading.episodes for reading in readings),
                errors=self.sessions.errors(),
                deviations=self._deviations + sum(reading.deviations for reading in readings),
                transports=dict(Counter(lanes.transport for lanes in self._running)),
                worker_restarts=self._worker_restarts,
                step_s=step_s,
            )


class ModelCounters:
    """Counts what a policy endpoint does, besides the counters of its queue of predictions."""

    def __init__(self) -> None:
        self.sessions = SessionCounters()
        """Its sessions."""
        self._batch_rows = HistogramCounter(BATCH_BOUNDS_ROWS)
        self._queue = HistogramCounter(DURATION_BOUNDS_NS)
        self._forward = HistogramCounter(DURATION_BOUNDS_NS)

    def note_waited(self, queue_ns: int) -> None:
        """Count a prediction whose batch begins."""
        self._queue.add(queue_ns)

    def note_batch(self, num_rows: int, forward_ns: int) -> None:
        """Count a batch that has run."""
        self._batch_rows.add(num_rows)
        self._forward.add(forward_ns)

    def statistics(
        self,
        queue: BatchQueueStatistics,
        *,
        routes: int,
        policy_version: int,
        torch_reason: Callable[[], str | None] | None = None,
    ) -> ModelStatistics:
        """Return the counters. From any thread.

        Args:
            queue: The counters of the queue of predictions.
            routes: How many are open.
            policy_version: The version of the present weights.
            torch_reason: See ``PolicyTraits``.
        """
        inference, reason = "", None
        if torch_reason is not None:
            reason = torch_reason()
            inference = "compiled" if reason is None else "torch"
        return ModelStatistics(
            **{name: getattr(queue, name) for name in BatchQueueStatistics.__slots__},
            version=__version__,
            uptime_s=self.sessions.uptime_s,
            sessions=self.sessions.sessions(),
            routes=routes,
            policy_version=policy_version,
            errors=self.sessions.errors(),
            batch_rows=histogram_of(BATCH_BOUNDS_ROWS, [self._batch_rows.read()]),
            queue_s=histogram_of(DURATION_BOUNDS_NS, [self._queue.read()], NS_PER_S),
            forward_s=histogram_of(DURATION_BOUNDS_NS, [self._forward.read()], NS_PER_S),
            inference=inference,
            torch_reason=reason or "",
        )
