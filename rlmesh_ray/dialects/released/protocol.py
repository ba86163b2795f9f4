"""The generation ``rlmesh-wire-v1``, that of the released rlmesh 0.1.0: rules, handshake, messages.

Editions match by their names; no checksum of a text is compared. The server answers only whether
they match: the client chooses the edition, and names it in the first message of its stream.

Of a model session, an adapter is a route of the edition; its id is that of its environment. Its
messages are the core's, except that several adapters can be asked in one frame.
"""

from collections.abc import Mapping

from rlmesh_ray.errors import HandshakeRefusedError
from rlmesh_ray.protocol.capabilities import EDITION_NAME
from rlmesh_ray.protocol.env_session import (
    EDITION_2026_06_RULES,
    EDITION_REQUESTS,
    Consequence,
    Effect,
    EnvRules,
    FailureKind,
    SessionState,
)
from rlmesh_ray.protocol.handshake import HandshakeRequest, HandshakeResponse, quoted
from rlmesh_ray.protocol.messages import (
    CloseRoute,
    Configure,
    ConfigureRoute,
    EnvErrorCode,
    MalformedRequest,
    Predict,
    Request,
    Response,
    message,
)
from rlmesh_ray.protocol.model_session import (
    ForgetEpisodes,
    ModelRules,
    RouteState,
    SessionResponse,
)

WIRE_V1 = "rlmesh-wire-v1"

# What servers of rlmesh 0.1.0 do, but for one thing: they end the session when the environment
# raises. They accept an edition without a name and those of its release candidates, too.
ENV_RULES = EnvRules(
    requests={
        **EDITION_REQUESTS,
        SessionState.AWAIT_RESET: {
            **EDITION_REQUESTS[SessionState.AWAIT_RESET],
            Configure: SessionState.AWAIT_RESET,
        },
        SessionState.READY: {**EDITION_REQUESTS[SessionState.READY], Configure: SessionState.READY},
    },
    failures={
        **EDITION_2026_06_RULES.failures,
        FailureKind.RAISED: Consequence(EnvErrorCode.INTERNAL, Effect.INTERRUPT_OWN),
        FailureKind.BAD_ACTION: Consequence(EnvErrorCode.INVALID_ACTION, Effect.NONE),
    },
    editions=frozenset({EDITION_NAME}),
    subsets_are_advertised=True,
    narrows_replies=True,
    client_mints_ids=True,
    spreads_one_seed=True,
    tracks_autoresets=True,
    reports_superseded=True,
    truncates_interrupted=True,
    ends_when_abandoned=True,
)

# A route is an adapter in this dialect.
MODEL_RULES = ModelRules(
    requests={
        RouteState.ABSENT: {
            ConfigureRoute: RouteState.CONFIGURED,
            # The end of an adapter or episode that the endpoint does not have is no error.
            ForgetEpisodes: RouteState.ABSENT,
            CloseRoute: RouteState.ABSENT,
        },
        RouteState.CONFIGURED: {
            ConfigureRoute: RouteState.CONFIGURED,
            Predict: RouteState.CONFIGURED,
            ForgetEpisodes: RouteState.CONFIGURED,
            CloseRoute: RouteState.ABSENT,
        },
    },
    remedy="send resolve_adapter first",
    keeps_same_route=True,
)


def make_released_offer(
    client_name: str, client_version: str, capabilities: Mapping[str, str]
) -> HandshakeRequest:
    """Return the offer of this package's clients.

    Args:
        client_name: Name of the program.
        client_version: Version of the program.
        capabilities: What the client can do beyond the edition; advisory.
    """
    return HandshakeRequest(
        generation=WIRE_V1,
        client_name=client_name,
        client_version=client_version,
        editions=(EDITION_NAME,),
        capabilities=capabilities,
    )


def answer_released_offer(
    offer: HandshakeRequest,
    *,
    server_version: str,
    capabilities: Mapping[str, str],
    contract: object = None,
    refusal: str = "",
) -> HandshakeResponse:
    """Answer ``offer``: with capabilities and contract if the peers match, else with the reason.

    Args:
        offer: The client's. One that names no editions is accepted: the client names the session's
            edition later.
        server_version: Version of this package.
        capabilities: What the endpoint can do beyond the edition; advisory.
        contract: The ``EnvContract`` of an EnvService, None for a ModelService.
        refusal: Why the endpoint serves no client of this generation; empty: it does.
    """
    reason = refusal or _mismatch(offer)
    return HandshakeResponse(
        compatible=not reason,
        generation=WIRE_V1,
        min_generation=WIRE_V1,
        server_version=server_version,
        editions=(EDITION_NAME,),
        capabilities={} if reason else capabilities,
        selected_edition=EDITION_NAME,
        error_message=reason,
        contract=None if reason else contract,
    )


def _mismatch(offer: HandshakeRequest) -> str:
    """Return why the peers do not match; empty: they do."""
    if offer.generation.strip() != WIRE_V1:
        return (
            f"protocol generation {quoted(offer.generation)!r} is not supported in this form of "
            f"handshake; it is that of {WIRE_V1!r}"
        )
    if offer.editions and EDITION_NAME not in offer.editions:
        offered = quoted(", ".join(offer.editions))
        return f"no mutual workflow edition (offered: {offered}; spoken here: {EDITION_NAME})"
    return ""


def accept_released_answer(_: HandshakeRequest, answer: HandshakeResponse) -> HandshakeResponse:
    """Return ``answer``, if a session can be held with the server that gave it.

    Raises:
        HandshakeRefusedError: The server refused, or does not have the edition.
    """
    version = f" (version {answer.server_version})" if answer.server_version else ""
    if not answer.compatible:
        says = f": {answer.error_message}" if answer.error_message else ""
        raise HandshakeRefusedError(f"the server{version} refuses {WIRE_V1}{says}", answer.editions)
    if EDITION_NAME not in answer.editions:
        editions = quoted(", ".join(answer.editions)) or "without a name"
        raise HandshakeRefusedError(
            f"the server{version} has editions {editions} of {WIRE_V1}, this package has "
            f"{EDITION_NAME}: install versions that match",
            answer.editions,
        )
    return answer


@message
class GroupedPredict(Request):
    """Ask several adapters at once."""

    groups: tuple[Predict | MalformedRequest, ...]
    """Their ``request_id`` is that of their context."""


@message
class GroupedPredicted(Response):
    """Answers GroupedPredict."""

    results: tuple[SessionResponse, ...]
    """One a group, in the request's order: Predicted, or ModelFailed."""
