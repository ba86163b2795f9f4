"""Handshake and edition negotiation in generation ``rlmesh-wire-v1``, both sides.

Editions match by their names; nobody shows a text's checksum. The server only says whether it can
be: which edition counts, the client chooses, and names it first thing in its stream.
"""

from collections.abc import Mapping

from rlmesh_ray.errors import HandshakeRefusedError
from rlmesh_ray.protocol.handshake import HandshakeRequest, HandshakeResponse, quoted
from rlmesh_ray.protocol.versions import EDITION_NAME, WIRE_V1


def make_released_offer(
    client_name: str, client_version: str, capabilities: Mapping[str, str]
) -> HandshakeRequest:
    """Return what this package's clients offer.

    Args:
        client_name: Of the program.
        client_version: Of the program.
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
) -> HandshakeResponse:
    """Answer ``offer``: with everything when the peers match, with the reason when not.

    Args:
        offer: What the client said. One that names no editions is taken: it names the session's
            later.
        server_version: Version of this package.
        capabilities: What the endpoint can do beyond the edition; advisory.
        contract: The ``EnvContract`` of an EnvService, None for a ModelService.
    """
    reason = ""
    if offer.generation.strip() != WIRE_V1:
        reason = (
            f"protocol generation {quoted(offer.generation)!r} is not supported in this form of "
            f"handshake; it is that of {WIRE_V1!r}"
        )
    elif offer.editions and EDITION_NAME not in offer.editions:
        offered = quoted(", ".join(offer.editions))
        reason = f"no mutual workflow edition (offered: {offered}; spoken here: {EDITION_NAME})"
    return released_answer(
        server_version, reason=reason, capabilities=capabilities, contract=contract
    )


def released_answer(
    server_version: str,
    *,
    reason: str = "",
    capabilities: Mapping[str, str] | None = None,
    contract: object = None,
) -> HandshakeResponse:
    """Return an answer.

    Args:
        server_version: Version of this package.
        reason: Why the peers do not match; empty: they do.
        capabilities: As for ``answer_released_offer``; told only if they match.
        contract: Likewise.
    """
    is_compatible = not reason
    return HandshakeResponse(
        compatible=is_compatible,
        generation=WIRE_V1,
        min_generation=WIRE_V1,
        server_version=server_version,
        editions=(EDITION_NAME,),
        capabilities=(capabilities or {}) if is_compatible else {},
        selected_edition=EDITION_NAME,
        error_message=reason,
        contract=contract if is_compatible else None,
    )


def check_released_answer(answer: HandshakeResponse) -> None:
    """Make sure that a session can be held with the server that gave ``answer``.

    Raises:
        HandshakeRefusedError: The server said no, or does not have the edition.
    """
    version = f" (version {answer.server_version})" if answer.server_version else ""
    if not answer.compatible:
        says = f": {answer.error_message}" if answer.error_message else ""
        raise HandshakeRefusedError(f"the server{version} refuses {WIRE_V1}{says}", answer.editions)
    if EDITION_NAME not in answer.editions:
        has = quoted(", ".join(answer.editions)) or "none that it names"
        raise HandshakeRefusedError(
            f"the server{version} speaks {WIRE_V1} with editions {has}, this package with "
            f"{EDITION_NAME}: install versions that match",
            answer.editions,
        )
