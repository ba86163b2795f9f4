"""The log of sessions: their begin and end, and the failures of their environments."""

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rlmesh_ray.protocol.env_session import Failure, FailureKind
from rlmesh_ray.server.endpoint.log_context import facts
from rlmesh_ray.server.observe.counters import SessionCounters

_LOG = logging.getLogger(__name__)

_MAX_KINDS = 1000
_PREFIXES = {
    FailureKind.TIMEOUT: "a request took too long: ",
    FailureKind.RAISED: "the environment raised an error: ",
    FailureKind.BAD_OBSERVATION: "the environment returned a value that it must not: ",
}
_NUMBER = re.compile(r"\d+")
_PLACE = re.compile(r'^  File "(.*)", line (\d+)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SessionLog:
    """Logs the begin and the end of one session."""

    counts: SessionCounters
    """Counters of the endpoint."""
    peer: str
    """gRPC's name of the client."""
    dialect: str
    """Name of the client's dialect."""
    done: Callable[[], Mapping[str, int]]
    """Returns counters of the session for the log, by name."""
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
        """Log the end; to be called once.

        Args:
            is_closed: Whether its Close was answered.
            is_idle: Whether the idle timeout has ended it.
            is_stopping: Whether the endpoint stops.
            has_failed: Whether a fault of this package has ended it.
        """
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


class FailureLog:
    """The failures of an endpoint's environments in its log: each kind once in full, then counted.

    Failures are of one kind if they are raised at the same line, or have no traceback and differ in
    numbers only.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def note(self, failure: Failure, detail: str = "") -> None:
        """Log a failure, if it is the first of its kind or the 10th, 100th, 1000th, ...

        Args:
            failure: The answer to the client.
            detail: Added to the message in the log.
        """
        places = _PLACE.findall(failure.debug_info)
        kind = f"{failure.kind.name} {places[-1] if places else _NUMBER.sub('0', failure.message)}"
        if kind not in self._counts and len(self._counts) >= _MAX_KINDS:
            kind = "others"
        self._counts[kind] += 1
        count = self._counts[kind]
        fields = facts(
            "environment_failed", kind=failure.kind.name.lower(), error=failure.message, count=count
        )
        if str(count).strip("0") != "1":  # not a power of ten
            return
        text = f"{_PREFIXES.get(failure.kind, '')}{failure.message}{detail}"
        if count > 1:
            text += f" (the {count}th time that this happens)"
        elif failure.debug_info:
            text += f"\n{failure.debug_info.rstrip()}"
        _LOG.error("%s", text, extra=fields)
