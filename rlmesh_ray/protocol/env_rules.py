"""Rules of env streams, by dialect: the legal requests of each state, and further differences.

The dialects share the states and ``env_session``. Differences in meaning are data here; no other
code depends on the dialect of a stream.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from rlmesh_ray.protocol.failure_effects import EDITION_FAILURES, Consequence, FailureKind
from rlmesh_ray.protocol.messages import Close, Render, Request, Reset, Step


class SessionState(enum.Enum):
    """State of one env stream."""

    AWAIT_RESET = enum.auto()
    READY = enum.auto()
    """At least one lane has been reset; with most rules all have."""
    ABANDONED = enum.auto()
    """After a non-recoverable error: only Close is legal."""
    CLOSED = enum.auto()


Requests = Mapping[SessionState, Mapping[type[Request], SessionState]]
"""The legal kinds of request in each state, with the state after success."""

EDITION_REQUESTS: Requests = {
    SessionState.AWAIT_RESET: {
        Reset: SessionState.READY,
        Render: SessionState.AWAIT_RESET,
        Close: SessionState.CLOSED,
    },
    SessionState.READY: {
        Reset: SessionState.READY,
        Step: SessionState.READY,
        Render: SessionState.READY,
        Close: SessionState.CLOSED,
    },
    SessionState.ABANDONED: {
        Close: SessionState.CLOSED,
    },
    SessionState.CLOSED: {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvRules:
    """The rules of one dialect."""

    requests: Requests
    failures: Mapping[FailureKind, Consequence]
    editions: frozenset[str] = frozenset()
    """The editions that a Configure may name."""
    subsets_are_advertised: bool = False
    """Whether Reset and Step may name their lanes only where the endpoint has the capability
    ``subset_step``, and then any lanes at any time. If not, any Reset but the first may."""
    narrows_replies: bool = False
    """Whether the response to a request that names its lanes has entries for these only, in the
    request's order. If not, it has entries for all lanes."""
    client_mints_ids: bool = False
    """Whether episodes have the ids that the client sends."""
    spreads_one_seed: bool = False
    """Whether a Reset of several lanes may have a single seed: lane ``i`` then gets seed + i."""
    tracks_autoresets: bool = False
    """Whether an episode that an autoreset begins is tracked like any other."""
    reports_superseded: bool = False
    """Whether the records of episodes that a Reset ends are sent with the next Step."""
    truncates_interrupted: bool = False
    """Whether an interrupted episode counts as truncated."""
    ends_when_abandoned: bool = False
    """Whether the stream ends after a non-recoverable error."""


EDITION_2026_06_RULES = EnvRules(requests=EDITION_REQUESTS, failures=EDITION_FAILURES)
