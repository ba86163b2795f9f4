"""Handshake and edition negotiation in generation ``rlmesh-wire-v1``, both sides.

Editions match by their names; no checksum of a text is compared. The server answers only whether
they match: the client chooses the edition, and names it in the first message of its stream.
"""

from collections.abc import Mapping

from rlmesh_ray.dialects.released.protocol.rules import WIRE_V1
from rlmesh_ray.errors import HandshakeRefusedError
from rlmesh_ray.protocol.capabilities import EDITION_NAME
from rlmesh_ray.protocol.handshake import HandshakeRequest, HandshakeResponse, quoted


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
