"""Handshake and edition negotiation, for both services and both sides.

The highest mutual edition is selected. While an edition is provisional, peers that show the
checksum of another text of it do not match: the same name would mean two contracts. An operator
who knows that another text differs in nothing that matters to him can say so: a server accepts
the texts in ``accept_texts``, a client presents the one in ``text``. Nothing does so by itself.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from rlmesh_ray.errors import ConfigurationError, HandshakeRefusedError
from rlmesh_ray.protocol.versions import EDITION_NAME, PROTOCOL_V1

GENERATION = PROTOCOL_V1

# Of a checksum, in messages; rlmesh 0.1.0b3 shows as many.
_SHOWN_DIGITS = 12
_LONGEST_QUOTE = 200


@dataclass(frozen=True, slots=True)
class Edition:
    """A behavioural contract, known by its name."""

    name: str
    spec_sha256: str
    """Checksum of the contract's text."""
    status: str
    """``"provisional"`` or ``"sealed"``."""


EDITION_2026_06 = Edition(
    EDITION_NAME,
    "3827ecdfb7ad3c756c88587101675a412083252027720e4d0f7daa588f431d1e",
    "provisional",
)
EDITIONS = (EDITION_2026_06,)

KNOWN_TEXTS: Mapping[str, str] = {
    # An earlier text of 2026.06, with the same messages and without "Value Conformance".
    "rlmesh-0.1.0b3": "c03b0c916521485492aa02507cacb7888a0752fc72860e53231296de4a27007f",
}
"""Texts of other implementations: their sha256 by the name that operators may write."""


@dataclass(frozen=True, slots=True)
class HandshakeRequest:
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
class HandshakeResponse:
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


def edition_sha256(name: str) -> str:
    """Return the sha256 of the edition text that an operator names.

    Args:
        name: 64 hexadecimal digits, or one of ``KNOWN_TEXTS``.

    Raises:
        ConfigurationError: It is neither.
    """
    digest = KNOWN_TEXTS.get(name, name).lower()
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise ConfigurationError(
            f"edition text {quoted(name)!r} is not known; write {' or '.join(KNOWN_TEXTS)}, or "
            "the text's sha256 as 64 hexadecimal digits"
        )
    return digest


def make_handshake_request(
    client_name: str, client_version: str, capabilities: Mapping[str, str], *, text: str = ""
) -> HandshakeRequest:
    """Return what this package's clients offer.

    Args:
        client_name: Of the program.
        client_version: Of the program.
        capabilities: What the client can do beyond the edition; advisory.
        text: The sha256 to present in place of the own text's, as ``edition_sha256`` returns it.
    """
    newest = EDITIONS[-1]
    return HandshakeRequest(
        generation=GENERATION,
        client_name=client_name,
        client_version=client_version,
        editions=tuple(edition.name for edition in EDITIONS),
        capabilities=capabilities,
        spec_sha256=text or newest.spec_sha256,
        status=newest.status,
    )


def answer_handshake(
    offer: HandshakeRequest,
    *,
    server_version: str,
    capabilities: Mapping[str, str],
    contract: object = None,
    accept_texts: Collection[str] = (),
) -> HandshakeResponse:
    """Answer ``offer``: with everything when the peers match, with the reason when not.

    Args:
        offer: What the client said.
        server_version: Version of this package.
        capabilities: What the endpoint can do beyond the edition; advisory.
        contract: The ``EnvContract`` of an EnvService, None for a ModelService.
        accept_texts: The sha256 of texts that count as this package's own, as ``edition_sha256``
            returns them. A client that shows one of them sees it in the answer.
    """
    selected, reason = _select(offer, accept_texts)
    if selected is None:
        return HandshakeResponse(
            compatible=False,
            generation=GENERATION,
            min_generation=GENERATION,
            server_version=server_version,
            editions=tuple(edition.name for edition in EDITIONS),
            error_message=reason,
        )
    is_echo = _pin_differs(selected, offer.spec_sha256)
    return HandshakeResponse(
        compatible=True,
        generation=GENERATION,
        min_generation=GENERATION,
        server_version=server_version,
        editions=tuple(edition.name for edition in EDITIONS),
        capabilities=capabilities,
        selected_edition=selected.name,
        spec_sha256=offer.spec_sha256 if is_echo else selected.spec_sha256,
        status=(is_echo and offer.status) or selected.status,
        contract=contract,
    )


def check_handshake_response(offer: HandshakeRequest, answer: HandshakeResponse) -> Edition:
    """Return the edition that ``answer`` selected, as the client that made ``offer``.

    Raises:
        HandshakeRefusedError: The server said no, or selected something not offered,
            or means another text by the same edition.
    """
    if not answer.compatible:
        says = f"; the server says: {answer.error_message}" if answer.error_message else ""
        remedy = _client_remedy(offer, answer.error_message)
        raise HandshakeRefusedError(f"{_version_mismatch(answer)}{says}{remedy}", answer.editions)
    if answer.generation and GENERATION not in (answer.generation, answer.min_generation):
        raise HandshakeRefusedError(
            f"{_version_mismatch(answer)}; the server took the offer for one of its own generation",
            answer.editions,
        )
    by_name = {edition.name: edition for edition in EDITIONS}
    if answer.selected_edition not in offer.editions or answer.selected_edition not in by_name:
        raise HandshakeRefusedError(
            f"{_version_mismatch(answer)}; the server selected edition "
            f"{answer.selected_edition!r}, which was not offered",
            answer.editions,
        )
    selected = by_name[answer.selected_edition]
    if answer.spec_sha256 != offer.spec_sha256 and _pin_differs(selected, answer.spec_sha256):
        remedy = _client_remedy(offer, answer.spec_sha256)
        raise HandshakeRefusedError(
            f"{_pin_message(selected, answer.spec_sha256)}{remedy}", answer.editions
        )
    return selected


def _version_mismatch(answer: HandshakeResponse) -> str:
    theirs = answer.generation or "no generation that it names"
    version = f" (version {answer.server_version})" if answer.server_version else ""
    return (
        f"the server{version} speaks {theirs}, this package {GENERATION} with edition "
        f"{EDITIONS[-1].name}: install versions that match"
    )


def _select(offer: HandshakeRequest, accept_texts: Collection[str]) -> tuple[Edition | None, str]:
    if offer.generation != GENERATION:
        return None, (
            f"protocol generation {quoted(offer.generation)!r} is not supported; "
            f"this endpoint speaks {GENERATION!r}"
        )
    mutual = [edition for edition in EDITIONS if edition.name in offer.editions]
    if not mutual:
        offered = quoted(", ".join(offer.editions)) or "none"
        return None, f"no mutual workflow edition (offered: {offered})"
    selected = mutual[-1]
    if _pin_differs(selected, offer.spec_sha256) and offer.spec_sha256 not in accept_texts:
        return None, (
            f"{_pin_message(selected, offer.spec_sha256)}{_server_remedy(offer.spec_sha256)}"
        )
    return selected, ""


def _pin_differs(edition: Edition, peer_sha256: str) -> bool:
    is_shown = peer_sha256 != ""
    return is_shown and edition.status == "provisional" and peer_sha256 != edition.spec_sha256


def _pin_message(edition: Edition, peer_sha256: str) -> str:
    return (
        f"provisional edition {edition.name} is pinned to the text with sha256 "
        f"{edition.spec_sha256[:_SHOWN_DIGITS]}…, the peer means {peer_sha256[:_SHOWN_DIGITS]}…"
    )


def _server_remedy(peer_sha256: str) -> str:
    """Name the server's option that lets a known text in."""
    name = _known_text(peer_sha256)
    if not name:
        return ""
    return (
        f", the text of {name}: serve with accept_edition_texts=[{name!r}] "
        f"(--accept-edition-text {name}) to let it in"
    )


def _client_remedy(offer: HandshakeRequest, told: str) -> str:
    """Say what makes the client present the text that the server means, where that is known.

    Args:
        offer: What was refused.
        told: A checksum, or words that quote its first digits: a refusal carries no checksum.
    """
    own = EDITIONS[-1].spec_sha256
    if offer.spec_sha256 != own and own[:_SHOWN_DIGITS] in told:
        return "; that is this package's own text: connect without edition_text (--edition-text)"
    name = _known_text(told)
    if not name or KNOWN_TEXTS[name] == offer.spec_sha256:
        return ""
    return (
        f"; that is the text of {name}: connect with edition_text={name!r} "
        f"(--edition-text {name}) to work with it"
    )


def _known_text(told: str) -> str:
    found = (name for name, sha256 in KNOWN_TEXTS.items() if sha256[:_SHOWN_DIGITS] in told)
    return next(found, "")


def quoted(text: str) -> str:
    """Return what a peer chose, cut: it may be megabytes long."""
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}…"
