"""Failures of env requests, and their effects: which lanes' episodes an error interrupts."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlmesh_ray.protocol.messages import EnvErrorCode

NOT_STARTED = "the environment has not started within"
"""Prefix of the message of a TIMEOUT while the environment is starting: the request was not
executed, the start goes on, and the client may send the request again."""


class FailureKind(enum.Enum):
    """Why a legal request failed."""

    TIMEOUT = enum.auto()
    """The deadline passed; the worker may still be busy, and its result is dropped."""
    RAISED = enum.auto()
    """The environment raised; its worker lives."""
    CRASHED = enum.auto()
    """The worker died or was killed."""
    BAD_ACTION = enum.auto()
    """The action does not conform to its space; the environment never saw it."""
    BAD_OBSERVATION = enum.auto()
    """The environment's observation does not conform to its space."""
    BAD_REQUEST = enum.auto()
    """The request's own arguments are wrong; nothing has changed."""
    OUT_OF_ORDER = enum.auto()
    """The request's number is neither the last one nor the next (``transport.exactly_once``)."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The request failed."""

    kind: FailureKind
    message: str
    """Error message for the client, in one line."""
    debug_info: str = ""
    """Traceback of the worker, as text."""


class Effect(enum.Enum):
    """Effect of a failure on the session."""

    NONE = enum.auto()
    INTERRUPT = enum.auto()
    """The episodes of all lanes end; a Reset starts new ones."""
    INTERRUPT_OWN = enum.auto()
    """The episodes of the request's lanes end; the other lanes go on."""
    ABANDON = enum.auto()
    """The session ends: the error is non-recoverable."""

    def interrupted_lanes(self, own: Sequence[int], all_lanes: Sequence[int]) -> Sequence[int]:
        """Return the lanes whose episodes end, and which have to be reset.

        Args:
            own: The lanes that the request names; empty: all.
            all_lanes: All lanes of the session.
        """
        if self is Effect.NONE:
            return ()
        return own or all_lanes if self is Effect.INTERRUPT_OWN else all_lanes


@dataclass(frozen=True, slots=True)
class Consequence:
    """Error code and effect of a kind of failure."""

    code: EnvErrorCode
    effect: Effect


# Edition 2026.06: "Timeouts and Errors", and "Structural conformance" for BAD_ACTION and
# BAD_OBSERVATION.
EDITION_FAILURES: Mapping[FailureKind, Consequence] = {
    FailureKind.TIMEOUT: Consequence(EnvErrorCode.TIMEOUT, Effect.INTERRUPT),
    FailureKind.CRASHED: Consequence(EnvErrorCode.CRASHED, Effect.INTERRUPT),
    FailureKind.RAISED: Consequence(EnvErrorCode.INTERNAL, Effect.INTERRUPT),
    FailureKind.BAD_ACTION: Consequence(EnvErrorCode.INVALID_ACTION, Effect.ABANDON),
    FailureKind.BAD_OBSERVATION: Consequence(EnvErrorCode.INTERNAL, Effect.ABANDON),
    FailureKind.BAD_REQUEST: Consequence(EnvErrorCode.INVALID_ACTION, Effect.NONE),
    FailureKind.OUT_OF_ORDER: Consequence(EnvErrorCode.INTERNAL, Effect.ABANDON),
}
RENDER_FAILURES: Mapping[FailureKind, Consequence] = {
    FailureKind.TIMEOUT: Consequence(EnvErrorCode.TIMEOUT, Effect.NONE),
    FailureKind.RAISED: Consequence(EnvErrorCode.INTERNAL, Effect.NONE),
}
"""What differs for Render, in all dialects: the episodes continue without the picture."""
