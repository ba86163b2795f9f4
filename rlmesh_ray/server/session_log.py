"""A session's begin and end in the log, and whether it ended as it should."""

import logging
import time
from collections.abc import Callable, Mapping

from rlmesh_ray.server.counts import SessionCounts
from rlmesh_ray.server.log_context import facts

_LOG = logging.getLogger(__name__)


class SessionLog:
    """One session; says so when it begins.

    Args:
        counts: The endpoint's.
        peer: Who it is, as gRPC names it.
        language: What it speaks.
        done: Tells what it has done up to now, for the log.
    """

    def __init__(
        self,
        counts: SessionCounts,
        peer: str,
        language: str,
        done: Callable[[], Mapping[str, int]],
    ) -> None:
        self._counts = counts
        self._done = done
        self._begun_s = time.monotonic()
        _LOG.info(
            "a session of %s begins, in %s",
            peer,
            language,
            extra=facts("session_begins", peer=peer, language=language),
        )

    def end(
        self, *, is_closed: bool, is_silent: bool, is_stopping: bool, has_failed: bool = False
    ) -> None:
        """Say that it has ended; to be called once.

        Args:
            is_closed: Whether its Close was answered.
            is_silent: Whether its client was silent for too long.
            is_stopping: Whether the endpoint would not have gone on.
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
            cause = "its client was silent" if is_silent else "its client has gone without Close"
        if is_lost:
            self._counts.note_lost()
        done, lasted_s = self._done(), time.monotonic() - self._begun_s
        _LOG.log(
            logging.WARNING if is_lost else logging.INFO,
            "the session ends after %.3g s and %s: %s",
            lasted_s,
            " and ".join(f"{count} {name}" for name, count in done.items()),
            cause,
            extra=facts("session_ends", cause=cause, lasted_s=round(lasted_s, 3), **done),
        )
