"""The checks by clause, and their results.

A check returns if its clause holds, and raises one of two exceptions else.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar


class Party(enum.Enum):
    """The party that a clause binds."""

    ENV_SERVER = "EnvService"
    MODEL_SERVER = "ModelService"
    SERVERS = "both services"
    CLIENT = "clients"


@dataclass(frozen=True, slots=True)
class Clause:
    """One requirement of the edition."""

    key: str
    """``section.name``"""
    binds: Party
    says: str


_ENV, _MODEL = Party.ENV_SERVER, Party.MODEL_SERVER
_BOTH, _CLIENT = Party.SERVERS, Party.CLIENT

SECTIONS: dict[str, tuple[Clause, ...]] = {
    "Session establishment": (
        Clause("session.handshake-first", _CLIENT, "Join follows a compatible handshake."),
        Clause("session.offer", _CLIENT, "The offer has the generation and the client's editions."),
        Clause("session.generation", _BOTH, "Another protocol generation is not compatible."),
        Clause(
            "session.mutual-edition", _BOTH, "An offer without a mutual edition is not compatible."
        ),
        Clause("session.highest-edition", _BOTH, "The highest mutual edition is selected."),
        Clause("session.refusal", _BOTH, "A refusal gives the reason and the server's editions."),
        Clause("session.one-round", _CLIENT, "After a refusal the client does not retry."),
        Clause("session.capabilities", _BOTH, "Capabilities never change what a message means."),
        Clause("session.contract", _ENV, "The contract comes with compatible, and only then."),
        Clause("session.contract-fixed", _ENV, "The contract does not change."),
    ),
    "Ordering": (
        Clause("ordering.arrival", _ENV, "Requests are answered in the order of arrival."),
        Clause("ordering.one-response", _ENV, "Each request has one response, with its id."),
        Clause("ordering.in-band", _ENV, "A request that fails is answered with an EnvError."),
    ),
    "Vectorization": (
        Clause("vector.width", _ENV, "The vector is as wide as the contract says."),
        Clause("vector.batches", _ENV, "Observations and actions cover all lanes."),
        Clause("vector.entries", _ENV, "Rewards and masks have one entry per lane."),
        Clause("vector.index-order", _ENV, "The entries are in the order of the lanes."),
        Clause("vector.nonzero", _CLIENT, "Any nonzero byte of a mask means set."),
    ),
    "Reset": (
        Clause("reset.all-lanes", _ENV, "A Reset restarts all lanes, even in mid-episode."),
        Clause("reset.first", _ENV, "A Step before the first Reset is refused."),
        Clause("reset.seeds", _ENV, "There are no seeds, or one per lane."),
        Clause("reset.response", _ENV, "The response has observations and an id for each lane."),
    ),
    "Step": (
        Clause("step.all-lanes", _ENV, "A Step is one step of each lane."),
        Clause("step.response", _ENV, "The response has all results of the step, and current ids."),
    ),
    "Episode accounting": (
        Clause("episodes.begin", _ENV, "Tracking begins at Reset, with counts of 0."),
        Clause("episodes.accrue", _ENV, "Each Step adds one step and its reward."),
        Clause("episodes.complete", _ENV, "The response of the ending step reports the end."),
        Clause(
            "episodes.metadata", _ENV, "A record has id, lane, seed, cause, times and last info."
        ),
        Clause("episodes.once", _ENV, "A record is delivered once."),
        Clause("episodes.empty-id", _ENV, "An ended lane's id is empty until the next Reset."),
        Clause("episodes.no-restart", _ENV, "An episode that an autoreset starts is not tracked."),
        Clause("episodes.autoreset", _ENV, "Ended lanes continue as the contract's mode says."),
    ),
    "Render and Close": (
        Clause("render.frame", _ENV, "The frame is a PNG; without a render mode there is none."),
        Clause("close.answer", _ENV, "Close is answered with the episodes that were running."),
        Clause("close.end", _ENV, "After the answer the stream ends; later requests get none."),
    ),
    "Timeouts and errors": (
        Clause("timeout.in-band", _ENV, "A deadline that passes is answered with TIMEOUT."),
        Clause("errors.interrupted", _ENV, "An error reports the episodes that it ends."),
        Clause("errors.content", _ENV, "An error has a code and a message."),
        Clause("errors.recoverable", _ENV, "After a recoverable error the session continues."),
        Clause("errors.abandon", _CLIENT, "After a non-recoverable error the session ends."),
    ),
    "Shutdown": (
        Clause("shutdown.distinct", _ENV, "The end of a session leaves the endpoint running."),
        Clause("shutdown.refusal", _BOTH, "A refused Shutdown changes nothing."),
    ),
    "Model workflow: routes": (
        Clause("model.establishment", _MODEL, "A model's handshake carries no contract."),
        Clause("route.configure-first", _MODEL, "Predict without a route is NOT_CONFIGURED."),
        Clause("route.contract-fixed", _MODEL, "A route keeps the contract it was opened with."),
        Clause("route.close", _MODEL, "CloseRoute releases the route."),
    ),
    "Model workflow: Predict": (
        Clause("predict.observation", _MODEL, "Observations are of the route's space, or refused."),
        Clause("predict.context", _MODEL, "The response mirrors the request's context."),
        Clause("predict.actions", _MODEL, "There is one action of the route's space per slot."),
    ),
    "Model workflow: ordering and errors": (
        Clause("model.one-response", _MODEL, "Each request has one response, with its id."),
        Clause("model.in-band", _MODEL, "Failures are ModelErrors with a code and a message."),
        Clause("model.recoverable", _MODEL, "After a recoverable error the session continues."),
        Clause("model.arrival", _MODEL, "Without concurrent_predict, answers come in order."),
        Clause("model.demultiplex", _CLIENT, "Clients tell responses apart by their ids."),
        Clause("model.route-order", _MODEL, "Requests of one route take effect in order."),
        Clause("model.close-drains", _MODEL, "Close is answered after all that came before."),
    ),
    "Structural conformance": (
        Clause("structure.dict-keys", _ENV, "A Dict without a declared key is rejected."),
        Clause("structure.box-shape", _ENV, "A Box of another shape is rejected."),
        Clause(
            "structure.multi-discrete-shape", _ENV, "A MultiDiscrete of another shape is rejected."
        ),
        Clause("structure.multi-binary-shape", _ENV, "A MultiBinary of another shape is rejected."),
        Clause("structure.tuple-arity", _ENV, "A Tuple with more or fewer parts is rejected."),
        Clause("structure.discrete-domain", _ENV, "A Discrete outside its domain is rejected."),
        Clause("structure.multi-discrete-domain", _ENV, "Each MultiDiscrete element has a domain."),
        Clause("structure.nan", _ENV, "NaN is rejected, also next to a range violation."),
        Clause("structure.non-recoverable", _ENV, "A structural rejection is non-recoverable."),
    ),
    "Range conformance": (
        Clause("range.policy", _ENV, "warn delivers and warns, strict rejects, off delivers."),
        Clause("range.infinite", _ENV, "An infinity is in range where the bound is infinite."),
        Clause("range.text", _ENV, "A Text's length and characters follow the policy, too."),
        Clause("range.shared", _ENV, "Observations and actions follow the same policy."),
    ),
    "Enforcement": (
        Clause("enforcement.observations", _ENV, "Wrong observations do not reach the client."),
        Clause("enforcement.actions", _ENV, "Actions reach the environment unchanged."),
    ),
    "Dtype conformance": (
        Clause("dtype.declared", _ENV, "Every delivered value has its declared dtype."),
        Clause("dtype.exact-bytes", _ENV, "Bytes of another dtype are rejected."),
        Clause("dtype.integers", _ENV, "Floats become integers only if nothing is lost."),
        Clause("dtype.floats", _ENV, "Floats are narrowed to their declared dtype."),
    ),
    "Conformance warnings": (
        Clause("warnings.place", _ENV, "Warnings are in the infos, under the reserved key."),
        Clause("warnings.once", _ENV, "Each kind and path is reported once per session."),
        Clause("warnings.advisory", _ENV, "Warnings leave the session usable."),
    ),
    "The generation's wire": (
        Clause("wire.pin", _BOTH, "A provisional edition's checksum must match, if it is shown."),
        Clause("wire.unreadable", _ENV, "A frame that is not a request is answered in band."),
        Clause("wire.bare-join", _ENV, "A Join without a session id is served, too."),
        Clause("wire.partial-reset", _ENV, "A Reset with env_indices restarts only those lanes."),
        Clause("wire.step-lanes", _ENV, "A Step's env_indices are refused."),
    ),
}
"""Clauses by section, in order; the last section holds what the schemas add to the text."""

CLAUSES: dict[str, Clause] = {
    clause.key: clause for clauses in SECTIONS.values() for clause in clauses
}


Check = Callable[[Any], None]
"""Gets the ``Subject`` of one of the services that its clause binds."""
AnyCheck = TypeVar("AnyCheck", bound=Check)

ENV: dict[str, Check] = {}
MODEL: dict[str, Check] = {}
_CHECKS = {Party.ENV_SERVER: (ENV,), Party.MODEL_SERVER: (MODEL,), Party.SERVERS: (ENV, MODEL)}


def holds(clause: str) -> Callable[[AnyCheck], AnyCheck]:
    """Add the decorated function to the checks of each service that the clause binds."""

    def keep(check: AnyCheck) -> AnyCheck:
        for checks in _CHECKS[CLAUSES[clause].binds]:
            assert clause not in checks, clause
            checks[clause] = check
        return check

    return keep


class ClauseBroken(Exception):  # a verdict rather than an error
    """The server violates the clause; the message says how."""


class ClauseNotObservable(Exception):
    """The clause cannot be checked with this endpoint; the message says what is missing."""


class Verdict(enum.Enum):
    HOLDS = "holds"
    BROKEN = "broken"
    NOT_OBSERVABLE = "not observable"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    clause: str
    """Key of the clause."""
    service: str
    """``"env"`` or ``"model"``."""
    verdict: Verdict
    message: str = ""
    """The violation, or what is missing; empty where the clause holds."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ClauseBroken(message)
