"""What may happen when on an env stream, and what follows from a failure, by dialect.

Dialects share the states and the machinery (``env_session``). Where they differ in meaning, it is
data here, and no other code asks which of them is spoken.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from rlmesh_ray.protocol.messages import (
    Close,
    EnvErrorCode,
    Render,
    Request,
    Reset,
    Step,
)
from rlmesh_ray.protocol.outcomes import FailureKind


class SessionState(enum.Enum):
    """Where one env stream stands."""

    AWAIT_RESET = enum.auto()
    READY = enum.auto()
    """At least one lane has been reset; with most rules then all have."""
    ABANDONED = enum.auto()
    """After a non-recoverable error: nothing works any more but Close."""
    CLOSED = enum.auto()


Requests = Mapping[SessionState, Mapping[type[Request], SessionState]]
"""The state after the request has succeeded. A kind that is missing is refused."""

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


class Effect(enum.Enum):
    """What a failure does to the session."""

    NONE = enum.auto()
    INTERRUPT = enum.auto()
    """The lanes are gone: their episodes end here, a Reset starts over."""
    INTERRUPT_OWN = enum.auto()
    """Likewise, but only the request's own lanes; the others go on."""
    ABANDON = enum.auto()
    """Non-recoverable."""


@dataclass(frozen=True, slots=True)
class Consequence:
    """How a kind of failure is answered."""

    code: EnvErrorCode
    effect: Effect


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvRules:
    """Where dialects differ in meaning, as data."""

    requests: Requests
    failures: Mapping[FailureKind, Consequence]
    editions: frozenset[str] = frozenset()
    """What a Configure may name, if it names any."""
    subsets_are_advertised: bool = False
    """Whether Reset and Step may name their lanes, any at any time, where the endpoint says so, and
    nowhere else. If not, only a Reset may, but for the first one."""
    narrows_replies: bool = False
    """Whether the answer to a request that names its lanes has entries for these only, in the
    request's order. If not, it has them for all lanes."""
    client_mints_ids: bool = False
    """Whether episodes have the ids that requests give them."""
    spreads_one_seed: bool = False
    """Whether a Reset of several lanes may have a single seed, from which they count up."""
    tracks_autoresets: bool = False
    """Whether what an autoreset begins is an episode like any other."""
    reports_superseded: bool = False
    """Whether the records of episodes that a Reset ends come with the next Step."""
    truncates_interrupted: bool = False
    """Whether an episode that is ended from outside counts as truncated."""
    ends_when_abandoned: bool = False
    """Whether the stream ends after the answer that tells of a non-recoverable error."""


# Edition 2026.06: "Timeouts and Errors"; "Structural conformance" for the two rejections.
EDITION_2026_06_RULES = EnvRules(
    requests=EDITION_REQUESTS,
    failures={
        FailureKind.TIMEOUT: Consequence(EnvErrorCode.TIMEOUT, Effect.INTERRUPT),
        FailureKind.CRASHED: Consequence(EnvErrorCode.CRASHED, Effect.INTERRUPT),
        FailureKind.RAISED: Consequence(EnvErrorCode.INTERNAL, Effect.INTERRUPT),
        FailureKind.BAD_ACTION: Consequence(EnvErrorCode.INVALID_ACTION, Effect.ABANDON),
        FailureKind.BAD_OBSERVATION: Consequence(EnvErrorCode.INTERNAL, Effect.ABANDON),
        FailureKind.BAD_REQUEST: Consequence(EnvErrorCode.INVALID_ACTION, Effect.NONE),
        FailureKind.OUT_OF_ORDER: Consequence(EnvErrorCode.INTERNAL, Effect.ABANDON),
    },
)
