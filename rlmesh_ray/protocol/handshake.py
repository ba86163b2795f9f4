"""Handshake and edition negotiation, for both services and both sides.

The highest mutual edition is selected. While an edition is provisional, peers that show the
checksum of another text of it do not match: the same name would mean two contracts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlmesh_ray.errors import HandshakeRefusedError

GENERATION = "rlmesh.protocol.v1"


@dataclass(frozen=True, slots=True)
class Edition:
    """A behavioural contract, known by its name."""

    name: str
    spec_sha256: str
    """Checksum of the contract's text."""
    status: str
    """``"provisional"`` or ``"sealed"``."""


EDITION_2026_06 = Edition(
    "2026.06",
    "3827ecdfb7ad3c756c88587101675a412083252027720e4d0f7daa588f431d1e",
    "provisional",
)
EDITIONS = (EDITION_2026_06,)


@dataclass(frozen=True, slots=True)
class Offer:
    """What the client says first."""

    generation: str
    client_name: str
    client_version: str
    editions: tuple[str, ...]
    capabilities: Mapping[str, str] = field(default_factory=dict)
    spec_sha256: str = ""
    """Of the edition that it offers; empty when it does not say."""
    status: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server replies."""

    compatible: bool
    generation: str
    min_generation: str
    server_version: str
    editions: tuple[str, ...]
    capabilities: Mapping[str, str] = field(default_factory=dict)
    selected_edition: str = ""
    spec_sha256: str = ""
    status: str = ""
    error_message: str = ""
    contract: object = None
    """The ``EnvContract``, opaque here; only when compatible, only from an EnvService."""


def make_offer(client_name: str, client_version: str, capabilities: Mapping[str, str]) -> Offer:
    """Return what this package's clients offer."""
    newest = EDITIONS[-1]
    return Offer(
        generation=GENERATION,
        client_name=client_name,
        client_version=client_version,
        editions=tuple(edition.name for edition in EDITIONS),
        capabilities=capabilities,
        spec_sha256=newest.spec_sha256,
        status=newest.status,
    )


def answer_offer(
    offer: Offer,
    *,
    server_version: str,
    capabilities: Mapping[str, str],
    contract: object = None,
) -> Answer:
    """Answer ``offer``: with everything when the peers match, with the reason when not.

    Args:
        offer: What the client said.
        server_version: Version of this package.
        capabilities: What the endpoint can do beyond the edition; advisory.
        contract: The ``EnvContract`` of an EnvService, None for a ModelService.
    """
    selected, reason = _select(offer)
    if selected is None:
        return Answer(
            compatible=False,
            generation=GENERATION,
            min_generation=GENERATION,
            server_version=server_version,
            editions=tuple(edition.name for edition in EDITIONS),
            error_message=reason,
        )
    return Answer(
        compatible=True,
        generation=GENERATION,
        min_generation=GENERATION,
        server_version=server_version,
        editions=tuple(edition.name for edition in EDITIONS),
        capabilities=capabilities,
        selected_edition=selected.name,
        spec_sha256=selected.spec_sha256,
        status=selected.status,
        contract=contract,
    )


def check_answer(offer: Offer, answer: Answer) -> Edition:
    """Return the edition that ``answer`` selected, as the client that made ``offer``.

    Raises:
        HandshakeRefusedError: The server said no, or selected something not offered,
            or means another text by the same edition.
    """
    if not answer.compatible:
        says = f"; the server says: {answer.error_message}" if answer.error_message else ""
        raise HandshakeRefusedError(f"{_who_speaks_what(answer)}{says}", answer.editions)
    by_name = {edition.name: edition for edition in EDITIONS}
    if answer.selected_edition not in offer.editions or answer.selected_edition not in by_name:
        raise HandshakeRefusedError(
            f"{_who_speaks_what(answer)}; the server selected edition "
            f"{answer.selected_edition!r}, which was not offered",
            answer.editions,
        )
    selected = by_name[answer.selected_edition]
    if answer.spec_sha256 and _pin_differs(selected, answer.spec_sha256):
        raise HandshakeRefusedError(_pin_message(selected, answer.spec_sha256), answer.editions)
    return selected


def _who_speaks_what(answer: Answer) -> str:
    theirs = answer.generation or "no generation that it names"
    version = f" (version {answer.server_version})" if answer.server_version else ""
    return (
        f"the server{version} speaks {theirs}, this package {GENERATION} with edition "
        f"{EDITIONS[-1].name}: install versions that match"
    )


def _select(offer: Offer) -> tuple[Edition | None, str]:
    if offer.generation != GENERATION:
        return None, (
            f"protocol generation {offer.generation!r} is not supported; "
            f"this endpoint speaks {GENERATION!r}"
        )
    mutual = [edition for edition in EDITIONS if edition.name in offer.editions]
    if not mutual:
        offered = ", ".join(offer.editions) or "none"
        return None, f"no mutual workflow edition (offered: {offered})"
    selected = mutual[-1]
    if offer.spec_sha256 and _pin_differs(selected, offer.spec_sha256):
        return None, _pin_message(selected, offer.spec_sha256)
    return selected, ""


def _pin_differs(edition: Edition, peer_sha256: str) -> bool:
    return edition.status == "provisional" and peer_sha256 != edition.spec_sha256


def _pin_message(edition: Edition, peer_sha256: str) -> str:
    return (
        f"provisional edition {edition.name} is pinned to the text with sha256 "
        f"{edition.spec_sha256[:12]}…, the peer means {peer_sha256[:12]}…"
    )
