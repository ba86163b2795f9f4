"""The counters behind an endpoint's statistics.

The serving loop counts; statistics may be read from any thread. Counters that must change together
are changed and summed up under a lock.
"""

import threading
import time
from collections import Counter
from dataclasses import dataclass

from rlmesh_ray import __version__
from rlmesh_ray.histogram import DURATION_BOUNDS_NS, NS_PER_S, histogram_of, num_counters
from rlmesh_ray.server.observe.statistics import EnvStatistics, SessionStatistics
from rlmesh_ray.transport.session_progress import SessionProgress


class SessionCounters:
    """Counts the sessions of an endpoint, and the errors of their requests."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self.num_open = self._opened = 0
        self.refused = 0
        """Sessions that were refused because the endpoint was full."""
        self.lost = 0
        """Sessions that ended without Close."""
        self.errors: Counter[str] = Counter()
        """Errors of requests, by code."""

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._started_s

    def note_opened(self) -> None:
        self._opened += 1
        self.num_open += 1

    def note_ended(self) -> None:
        self.num_open -= 1

    def sessions(self) -> SessionStatistics:
        return SessionStatistics(self.num_open, self._opened, self.refused, self.lost)


@dataclass(frozen=True, slots=True)
class LaneTotals:
    """Counts of lanes: of one session, or of several."""

    durations: tuple[int, ...] = (0,) * num_counters(DURATION_BOUNDS_NS)
    """Vector steps by duration, as ``HistogramCounter.read`` returns them."""
    lane_steps: int = 0
    episodes: int = 0
    """Episodes that were seen to end."""
    deviations: int = 0
    """Values out of range, and episodes that such a value has truncated."""
    resets: int = 0
    """Resets that succeeded."""

    @property
    def num_steps(self) -> int:
        return sum(self.durations[:-1])

    def __add__(self, other: "LaneTotals") -> "LaneTotals":
        pairs = zip(self.durations, other.durations, strict=True)
        return LaneTotals(
            tuple(one + another for one, another in pairs),
            self.lane_steps + other.lane_steps,
            self.episodes + other.episodes,
            self.deviations + other.deviations,
            self.resets + other.resets,
        )


class LaneCounters:
    """Counts what the lanes of one session do."""

    def __init__(self) -> None:
        self.resets = 0
        """Resets that succeeded."""
        self.transport = "grpc"
        """The present transport of its steps."""
        self.progress: SessionProgress | None = None
        """Of its worker, with the statistics of the workers before; None: it had no request yet."""

    def read(self) -> LaneTotals:
        progress = self.progress
        if progress is None:
            return LaneTotals(resets=self.resets)
        return LaneTotals(progress.steps.read(), *progress.lane_totals, self.resets)


class EnvCounters:
    """Counts what an environment endpoint does."""

    def __init__(self) -> None:
        self.sessions = SessionCounters()
        """Its sessions."""
        self._lock = threading.Lock()
        self._running: set[LaneCounters] = set()
        self._ended = LaneTotals()
        self.worker_restarts = 0
        """Worker processes that took the place of another within a session."""

    def open(self) -> LaneCounters:
        lanes = LaneCounters()
        with self._lock:
            self._running.add(lanes)
            self.sessions.note_opened()
        return lanes

    def close(self, lanes: LaneCounters) -> None:
        """Add a session's counts to the endpoint's; to be called once."""
        with self._lock:
            self._ended += lanes.read()
            self._running.discard(lanes)
            self.sessions.note_ended()

    def statistics(self) -> EnvStatistics:
        """Return the counters. From any thread."""
        with self._lock:
            total = sum((lanes.read() for lanes in self._running), self._ended)
            transports = Counter(lanes.transport for lanes in self._running)
            sessions, errors = self.sessions.sessions(), dict(self.sessions.errors)
        return EnvStatistics(
            version=__version__,
            uptime_s=self.sessions.uptime_s,
            sessions=sessions,
            steps=total.num_steps,
            lane_steps=total.lane_steps,
            resets=total.resets,
            episodes=total.episodes,
            errors=errors,
            deviations=total.deviations,
            transports=dict(transports),
            worker_restarts=self.worker_restarts,
            step_s=histogram_of(DURATION_BOUNDS_NS, total.durations, NS_PER_S),
        )
