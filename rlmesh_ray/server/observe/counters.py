"""What an endpoint counts of its sessions, and what it logs of them.

The serving loop counts; statistics may be read from any thread. Counters that must change together
are changed and summed up under a lock.
"""

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rlmesh_ray import __version__
from rlmesh_ray.histogram import DURATION_BOUNDS_NS, NS_PER_S, histogram_of, num_counters
from rlmesh_ray.protocol.env_session import Failure, FailureKind
from rlmesh_ray.server.endpoint.log import facts
from rlmesh_ray.server.observe.statistics import EnvStatistics, SessionStatistics
from rlmesh_ray.transport.exactly_once import SessionProgress

_LOG = logging.getLogger(__name__)


class SessionCounters:
    """Counts the sessions of an endpoint, and the errors of their requests."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self.num_open = self._opened = 0
        # As in ``SessionStatistics``.
        self.refused = self.lost = 0
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
    # As in ``EnvStatistics``.
    lane_steps: int = 0
    episodes: int = 0
    deviations: int = 0
    resets: int = 0

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
        self._lock = threading.Lock()
        self._running: set[LaneCounters] = set()
        self._ended = LaneTotals()
        self.worker_restarts = 0

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


# --- the log -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionLog:
    """Logs the begin and the end of one session."""

    counts: SessionCounters
    """Counters of the endpoint."""
    peer: str
    """gRPC's name of the client."""
    dialect: str
    done: Callable[[], Mapping[str, int]]
    """Returns what the session has done, by name."""
    begun_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        _LOG.info(
            "client %s opened a session (%s)",
            self.peer,
            self.dialect,
            extra=facts("session_begins", peer=self.peer, language=self.dialect),
        )

    def end(
        self, *, is_closed: bool, is_idle: bool, is_stopping: bool, has_failed: bool = False
    ) -> None:
        """Log the end, and count a loss; to be called once."""
        is_lost = not (is_closed or is_stopping)
        if is_closed:
            cause = "closed"
        elif is_stopping:
            cause = "the endpoint stops"
        elif has_failed:
            cause = "a fault of the endpoint"
        else:
            cause = "the client was silent" if is_idle else "the client left without Close"
        if is_lost:
            self.counts.lost += 1
        done, lasted_s = self.done(), time.monotonic() - self.begun_s
        _LOG.log(
            logging.WARNING if is_lost else logging.INFO,
            "the session of client %s ended after %.3g s and %s: %s",
            self.peer,
            lasted_s,
            " and ".join(f"{count} {name}" for name, count in done.items()),
            cause,
            extra=facts("session_ends", cause=cause, lasted_s=round(lasted_s, 3), **done),
        )


_MAX_KINDS = 1000
_PREFIXES = {
    FailureKind.TIMEOUT: "a request took too long: ",
    FailureKind.RAISED: "the environment raised an error: ",
    FailureKind.BAD_OBSERVATION: "the environment returned a value that it must not: ",
}
_NUMBER = re.compile(r"\d+")
_PLACE = re.compile(r'^  File "(.*)", line (\d+)', re.MULTILINE)


class FailureLog:
    """The failures of an endpoint's environments in its log: each kind once in full, then counted.

    Failures are of one kind if they are raised at the same line, or have no traceback and differ in
    numbers only.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def note(self, failure: Failure, detail: str = "") -> None:
        """Log a failure, if it is the first of its kind or the 10th, 100th, 1000th, ..."""
        places = _PLACE.findall(failure.debug_info)
        kind = f"{failure.kind.name} {places[-1] if places else _NUMBER.sub('0', failure.message)}"
        if kind not in self._counts and len(self._counts) >= _MAX_KINDS:
            kind = "others"
        self._counts[kind] += 1
        count = self._counts[kind]
        if str(count).strip("0") != "1":  # not a power of ten
            return
        text = f"{_PREFIXES.get(failure.kind, '')}{failure.message}{detail}"
        if count > 1:
            text += f" (the {count}th time that this happens)"
        elif failure.debug_info:
            text += f"\n{failure.debug_info.rstrip()}"
        fields = facts(
            "environment_failed", kind=failure.kind.name.lower(), error=failure.message, count=count
        )
        _LOG.error("%s", text, extra=fields)
