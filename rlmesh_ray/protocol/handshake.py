"""Handshake and edition negotiation, for both services and both sides. Sans-I/O.

One edition exists so far, which is selected where both sides have it. While it is provisional,
peers with different checksums of its text do not match: one name would stand for two contracts. An
operator can accept another text explicitly: a server accepts the texts in ``accept_texts``, a
client presents the one in ``text``.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from rlmesh_ray.errors import ConfigurationError, HandshakeRefusedError, printable
from rlmesh_ray.protocol.capabilities import EDITION_NAME, PROTOCOL_V1

GENERATION = PROTOCOL_V1

# Digits of a checksum in messages, as many as in rlmesh 0.1.0b3.
_SHOWN_DIGITS = 12
_LONGEST_QUOTE = 200


@dataclass(frozen=True, slots=True)
class Edition:
    """A version of the workflow specification."""

    name: str
    spec_sha256: str
    """Checksum of its text."""
    status: str
    """``"provisional"`` or ``"sealed"``."""


EDITION_2026_06 = Edition(
    EDITION_NAME,
    "3827ecdfb7ad3c756c88587101675a412083252027720e4d0f7daa588f431d1e",
    "provisional",
)

KNOWN_TEXTS: Mapping[str, str] = {
    # An earlier text of 2026.06, with the same messages and without "Value Conformance".
    "rlmesh-0.1.0b3": "c03b0c916521485492aa02507cacb7888a0752fc72860e53231296de4a27007f",
}
"""Edition texts of other implementations: sha256 by the name that operators may use for it."""


@dataclass(frozen=True, slots=True)
class HandshakeRequest:
    """HandshakeRequest of the edition: the client's offer."""

    generation: str
    client_name: str
    client_version: str
    editions: tuple[str, ...]
    capabilities: Mapping[str, str] = field(default_factory=dict)
    spec_sha256: str = ""
    """Checksum of the offered edition's text; empty where the client does not send it."""
    status: str = ""


@dataclass(frozen=True, slots=True)
class HandshakeResponse:
    """HandshakeResponse of the edition: the server's answer to an offer."""

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
    """Return the sha256 of a text: 64 hexadecimal digits, or one of ``KNOWN_TEXTS``."""
    digest = KNOWN_TEXTS.get(name, name).lower()
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise ConfigurationError(
            f"edition text {quoted(name)!r} is not known; give {' or '.join(KNOWN_TEXTS)}, or "
            "the text's sha256 as 64 hexadecimal digits"
        )
    return digest


def make_handshake_request(
    client_name: str, client_version: str, capabilities: Mapping[str, str], *, text: str = ""
) -> HandshakeRequest:
    """Return the offer of this package's clients.

    ``text`` is the sha256 to present instead of this package's own, from ``edition_sha256``.
    """
    return HandshakeRequest(
        generation=GENERATION,
        client_name=client_name,
        client_version=client_version,
        editions=(EDITION_2026_06.name,),
        capabilities=capabilities,
        spec_sha256=text or EDITION_2026_06.spec_sha256,
        status=EDITION_2026_06.status,
    )


def answer_handshake(
    offer: HandshakeRequest,
    *,
    server_version: str,
    capabilities: Mapping[str, str],
    contract: object = None,
    accept_texts: Collection[str] = (),
) -> HandshakeResponse:
    """Return the answer to ``offer``: the selected edition, or the reason of the refusal.

    The contract is that of an EnvService. The sha256 in ``accept_texts`` (see ``edition_sha256``)
    are accepted besides this package's own; the answer repeats the one that the client presents.
    """
    reason = _obstacle(offer, accept_texts)
    refusal = HandshakeResponse(
        compatible=False,
        generation=GENERATION,
        min_generation=GENERATION,
        server_version=server_version,
        editions=(EDITION_2026_06.name,),
        error_message=reason,
    )
    if reason:
        return refusal
    is_echo = _pin_differs(offer.spec_sha256)
    return replace(
        refusal,
        compatible=True,
        capabilities=capabilities,
        selected_edition=EDITION_2026_06.name,
        spec_sha256=offer.spec_sha256 if is_echo else EDITION_2026_06.spec_sha256,
        status=(is_echo and offer.status) or EDITION_2026_06.status,
        contract=contract,
    )


def check_handshake_response(
    offer: HandshakeRequest, answer: HandshakeResponse
) -> HandshakeResponse:
    """Return ``answer`` if it has selected an edition; for the client that sent ``offer``.

    Raises HandshakeRefusedError where the server refused, selected an edition that was not offered,
    or has another text of the edition.
    """
    if not answer.compatible:
        reason = f"; the server says: {answer.error_message}" if answer.error_message else ""
        remedy = _client_remedy(offer, answer.error_message)
        raise HandshakeRefusedError(f"{_version_mismatch(answer)}{reason}{remedy}", answer.editions)
    if answer.generation and GENERATION not in (answer.generation, answer.min_generation):
        raise HandshakeRefusedError(
            f"{_version_mismatch(answer)}; the server took the offer for one of its own generation",
            answer.editions,
        )
    selected = answer.selected_edition
    if selected not in offer.editions or selected != EDITION_2026_06.name:
        raise HandshakeRefusedError(
            f"{_version_mismatch(answer)}; the server selected edition "
            f"{selected!r}, which was not offered",
            answer.editions,
        )
    if answer.spec_sha256 != offer.spec_sha256 and _pin_differs(answer.spec_sha256):
        remedy = _client_remedy(offer, answer.spec_sha256)
        raise HandshakeRefusedError(f"{_pin_message(answer.spec_sha256)}{remedy}", answer.editions)
    return answer


def _version_mismatch(answer: HandshakeResponse) -> str:
    generation = answer.generation or "no generation that it names"
    version = f" (version {answer.server_version})" if answer.server_version else ""
    return (
        f"the server{version} supports {generation}, this package {GENERATION} with edition "
        f"{EDITION_2026_06.name}: install versions that match"
    )


def _obstacle(offer: HandshakeRequest, accept_texts: Collection[str]) -> str:
    """Return why a server refuses an offer; empty: it has selected the edition."""
    if offer.generation != GENERATION:
        return (
            f"protocol generation {quoted(offer.generation)!r} is not supported; "
            f"this endpoint supports {GENERATION!r}"
        )
    if EDITION_2026_06.name not in offer.editions:
        offered = quoted(", ".join(offer.editions)) or "none"
        return f"no mutual workflow edition (offered: {offered})"
    if _pin_differs(offer.spec_sha256) and offer.spec_sha256 not in accept_texts:
        return f"{_pin_message(offer.spec_sha256)}{_server_remedy(offer.spec_sha256)}"
    return ""


def _pin_differs(peer_sha256: str) -> bool:
    return EDITION_2026_06.status == "provisional" and peer_sha256 not in (
        "",
        EDITION_2026_06.spec_sha256,
    )


def _pin_message(peer_sha256: str) -> str:
    return (
        f"provisional edition {EDITION_2026_06.name} is pinned to the text with sha256 "
        f"{EDITION_2026_06.spec_sha256[:_SHOWN_DIGITS]}…, the peer has "
        f"{peer_sha256[:_SHOWN_DIGITS]}…"
    )


def _server_remedy(peer_sha256: str) -> str:
    name = _known_text(peer_sha256)
    if not name:
        return ""
    return (
        f", the text of {name}: to accept it, serve with ListenOptions(accept_edition_texts="
        f"[{name!r}]) (--accept-edition-text {name})"
    )


def _client_remedy(offer: HandshakeRequest, server_text: str) -> str:
    """Return the client's option that presents the server's text, where that is known.

    ``server_text`` is its checksum, or an error message that quotes the first digits.
    """
    own = EDITION_2026_06.spec_sha256
    if offer.spec_sha256 != own and own[:_SHOWN_DIGITS] in server_text:
        return "; that is this package's own text: connect without edition_text (--edition-text)"
    name = _known_text(server_text)
    if not name or KNOWN_TEXTS[name] == offer.spec_sha256:
        return ""
    return (
        f"; that is the text of {name}: connect with edition_text={name!r} "
        f"(--edition-text {name}) to work with it"
    )


def _known_text(message: str) -> str:
    found = (name for name, sha256 in KNOWN_TEXTS.items() if sha256[:_SHOWN_DIGITS] in message)
    return next(found, "")


def quoted(text: str) -> str:
    """Return a peer's text for a message, printable and truncated: it may be megabytes long."""
    shown = printable(text[: _LONGEST_QUOTE + 1])
    return shown if len(shown) <= _LONGEST_QUOTE else f"{shown[:_LONGEST_QUOTE]}…"
