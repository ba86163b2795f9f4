"""The counters behind an endpoint's statistics: additions where things happen, sums when asked.

Counting belongs to the serving loop, and for a policy to whoever runs its batches; anybody may
ask. What several threads must see change together is changed and summed up under a lock.
"""

import threading
import time
from collections import Counter

from rlmesh_ray import __version__
from rlmesh_ray.envs.line_control import LineControl
from rlmesh_ray.histogram import (
    BATCH_BOUNDS_ROWS,
    DURATION_BOUNDS_NS,
    NS_PER_S,
    Buckets,
    histogram_of,
)
from rlmesh_ray.models.batcher import BatcherStatistics
from rlmesh_ray.server.statistics import EnvStatistics, ModelStatistics, SessionStatistics


class SessionCounts:
    """What the sessions of an endpoint come to."""

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
        """Count one that there was no place for."""
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


class LaneCounts:
    """What the lanes of one session have done: over the stream, and over its line."""

    def __init__(self) -> None:
        self.resets = 0
        """Resets that succeeded."""
        self.deviations = 0
        """Values out of range that came over the stream, and over lines that have ended."""
        self._steps = Buckets(DURATION_BOUNDS_NS)
        self._lane_steps = 0
        self._episodes = 0
        self._line: LineControl | None = None
        self._num_lanes = 0

    @property
    def num_steps(self) -> int:
        """Vector steps up to now."""
        return sum(self.read()[0][:-1])

    def note_step(self, took_ns: int, num_lanes: int, num_ended: int) -> None:
        """Count a vector step of ``num_lanes`` lanes; in ``num_ended`` of them it was the last."""
        self._steps.add(took_ns)
        self._lane_steps += num_lanes
        self._episodes += num_ended

    def follow(self, line: LineControl, num_lanes: int) -> None:
        """Count what is done over a line, too, until ``settle``."""
        self._line, self._num_lanes = line, num_lanes

    def settle(self) -> None:
        """Take over what a line has counted, which has ended; nothing, if there is none."""
        line, self._line = self._line, None
        if line is not None:
            reading = line.steps.read()
            self._steps.take_over(reading)
            self._lane_steps += sum(reading[:-1]) * self._num_lanes
            self._episodes += line.num_ended
            self.deviations += line.num_deviations

    @property
    def num_deviations(self) -> int:
        """Values out of range up to now."""
        line = self._line
        return self.deviations + (line.num_deviations if line is not None else 0)

    def read(self) -> tuple[tuple[int, ...], int, int]:
        """Return the steps by duration, the steps of lanes, and the episodes."""
        steps, lane_steps, episodes = self._steps.read(), self._lane_steps, self._episodes
        line = self._line
        if line is None:
            return steps, lane_steps, episodes
        over_line = line.steps.read()
        lane_steps += sum(over_line[:-1]) * self._num_lanes
        both = tuple(one + other for one, other in zip(steps, over_line, strict=True))
        return both, lane_steps, episodes + line.num_ended


class EnvCounts:
    """What an environment endpoint has done."""

    def __init__(self) -> None:
        self.sessions = SessionCounts()
        """Its sessions."""
        self._lock = threading.Lock()
        self._running: set[LaneCounts] = set()
        self._steps = Buckets(DURATION_BOUNDS_NS)
        self._lane_steps = self._resets = self._episodes = self._worker_restarts = 0
        self._deviations = 0

    def open(self) -> LaneCounts:
        """Return where to count what a new session does."""
        lanes = LaneCounts()
        with self._lock:
            self._running.add(lanes)
            self.sessions.note_opened()
        return lanes

    def close(self, lanes: LaneCounts) -> None:
        """Take over what a session has counted; to be called once."""
        with self._lock:
            lanes.settle()
            steps, lane_steps, episodes = lanes.read()
            self._steps.take_over(steps)
            self._lane_steps += lane_steps
            self._episodes += episodes
            self._resets += lanes.resets
            self._deviations += lanes.deviations
            self._running.discard(lanes)
            self.sessions.note_ended()

    def settle(self, lanes: LaneCounts) -> None:
        """See ``LaneCounts.settle``."""
        with self._lock:
            lanes.settle()

    def note_worker_restart(self) -> None:
        """Count a worker process that takes the place of another within a session."""
        self._worker_restarts += 1

    def statistics(self) -> EnvStatistics:
        """Return what has been counted. From any thread."""
        with self._lock:
            readings = [lanes.read() for lanes in self._running]
            resets = self._resets + sum(lanes.resets for lanes in self._running)
            deviations = self._deviations + sum(lanes.num_deviations for lanes in self._running)
            step_s = histogram_of(
                DURATION_BOUNDS_NS,
                [self._steps.read(), *(steps for steps, _, _ in readings)],
                NS_PER_S,
            )
            return EnvStatistics(
                version=__version__,
                uptime_s=self.sessions.uptime_s,
                sessions=self.sessions.sessions(),
                steps=step_s.count,
                lane_steps=self._lane_steps + sum(lane_steps for _, lane_steps, _ in readings),
                resets=resets,
                episodes=self._episodes + sum(episodes for _, _, episodes in readings),
                errors=self.sessions.errors(),
                deviations=deviations,
                worker_restarts=self._worker_restarts,
                step_s=step_s,
            )


class ModelCounts:
    """What a policy endpoint has done, besides what its batcher counts."""

    def __init__(self) -> None:
        self.sessions = SessionCounts()
        """Its sessions."""
        self._batch_rows = Buckets(BATCH_BOUNDS_ROWS)
        self._queue = Buckets(DURATION_BOUNDS_NS)
        self._forward = Buckets(DURATION_BOUNDS_NS)

    def note_waited(self, queue_ns: int) -> None:
        """Count a prediction whose batch begins."""
        self._queue.add(queue_ns)

    def note_batch(self, num_rows: int, forward_ns: int) -> None:
        """Count a batch that has run."""
        self._batch_rows.add(num_rows)
        self._forward.add(forward_ns)

    def statistics(
        self, batcher: BatcherStatistics, *, routes: int, policy_version: int
    ) -> ModelStatistics:
        """Return what has been counted. From any thread.

        Args:
            batcher: What the batcher has counted.
            routes: That are open.
            policy_version: Of the weights that act.
        """
        return ModelStatistics(
            **{name: getattr(batcher, name) for name in BatcherStatistics.__slots__},
            version=__version__,
            uptime_s=self.sessions.uptime_s,
            sessions=self.sessions.sessions(),
            routes=routes,
            policy_version=policy_version,
            errors=self.sessions.errors(),
            batch_rows=histogram_of(BATCH_BOUNDS_ROWS, [self._batch_rows.read()]),
            queue_s=histogram_of(DURATION_BOUNDS_NS, [self._queue.read()], NS_PER_S),
            forward_s=histogram_of(DURATION_BOUNDS_NS, [self._forward.read()], NS_PER_S),
        )
