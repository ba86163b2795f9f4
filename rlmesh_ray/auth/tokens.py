"""Bearer tokens of endpoints: roles, token files' format, and derived tokens."""

import base64
import enum
import hashlib
import hmac
from dataclasses import dataclass, field

from rlmesh_ray.errors import ConfigurationError

_PURPOSE = "rlmesh_ray.token.v1"
_REMEDY = "make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"


class TokenRole(enum.IntEnum):
    """Permissions of a token; each role includes those before it."""

    PROBE = 1
    """Health checks, Handshake, and observing sessions."""
    CLIENT = 2
    """Sessions, too."""
    OPERATOR = 3
    """All calls: also Shutdown, where the endpoint allows it."""

    @property
    def label(self) -> str:
        """The role's name in a token file."""
        return self.name.lower()


_ROLES = {role.label: role for role in TokenRole}
_OWN_ROLES = {"Handshake": TokenRole.PROBE, "Shutdown": TokenRole.OPERATOR}
_PROBED = ("/grpc.health.v1.Health/", "/rlmesh_ray.observe.v1.ObserverService/")


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token and its role."""

    token: str = field(repr=False)
    role: TokenRole = TokenRole.OPERATOR


def bearer_value(token: str) -> str:
    """Return the value of the metadata entry ``authorization``.

    Raises:
        ConfigurationError: ``token`` is empty, or has characters that gRPC metadata cannot carry.
    """
    if not isinstance(token, str):  # a caller may pass anything
        raise ConfigurationError(
            f"the token is of type {type(token).__name__}; give a str or a TokenFile"
        )
    if not (token and token.isascii() and token.isprintable() and token.strip() == token):
        raise ConfigurationError(
            "the token must be printable ASCII characters, without a space at either end; "
            f"{_REMEDY}"
        )
    return f"Bearer {token}"


def required_role(method: str) -> TokenRole:
    """Return the role that a call requires.

    Args:
        method: Full path of the call, such as ``/rlmesh.env.v1.EnvService/Join``.
    """
    if method.startswith(_PROBED):
        return TokenRole.PROBE
    return _OWN_ROLES.get(method.rpartition("/")[2], TokenRole.CLIENT)


def parse_tokens(data: bytes, source: str) -> tuple[TokenEntry, ...]:
    """Return the entries of a token file: on each line ``TOKEN`` or ``TOKEN ROLE``.

    A token without a role allows everything. Empty lines and lines that begin with ``#`` are
    ignored.

    Args:
        data: Content of the file.
        source: Name of the file in error messages.

    Raises:
        ConfigurationError: A line is malformed, or there is none. The message names the line and
            never quotes it: it may contain a token.
    """
    entries: dict[str, TokenEntry] = {}
    # Not splitlines, which also splits at form feeds and the like.
    for number, line in enumerate(data.decode("latin-1").split("\n"), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        entry = _entry(words, f"{source}, line {number}")
        if entries.setdefault(entry.token, entry) != entry:
            raise ConfigurationError(
                f"{source}, line {number}: an earlier line has this token with another role; keep "
                "one of the lines"
            )
    if not entries:
        raise ConfigurationError(f"{source} is empty: it holds no token; {_REMEDY}")
    return tuple(entries.values())


def _entry(words: list[str], where: str) -> TokenEntry:
    token, *roles = words
    if not (token.isascii() and token.isprintable()):
        raise ConfigurationError(f"{where}: the token is not printable ASCII; {_REMEDY}")
    if not roles:
        return TokenEntry(token)
    if len(roles) > 1 or roles[0] not in _ROLES:
        raise ConfigurationError(
            f"{where}: a line is a token without spaces, and may be followed by its role: "
            f"{', '.join(_ROLES)}"
        )
    return TokenEntry(token, _ROLES[roles[0]])


def derive_token(secret: str, endpoint_id: str, role: str = "client") -> str:
    """Return the token of one endpoint and role, by HMAC-SHA256 with ``secret`` as the key.

    Each party that has the secret derives the tokens itself; a token reveals neither the secret nor
    another token.

    Args:
        secret: Secret of a fleet; never Ray's token.
        endpoint_id: Endpoint that accepts the token.
        role: Role of the token there.
    """
    # None of the parts can contain the separator, so different parts give different texts.
    text = "\0".join((_PURPOSE, endpoint_id, role))
    digest = hmac.digest(secret.encode(), text.encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
