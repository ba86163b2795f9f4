"""The tokens that calls to an endpoint carry, and what each of them allows."""

import base64
import enum
import hashlib
import hmac
from dataclasses import dataclass, field

from rlmesh_ray.errors import ConfigurationError

_PURPOSE = "rlmesh_ray.token.v1"
_REMEDY = "make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"


class TokenRole(enum.IntEnum):
    """What a token allows; each role includes those before it."""

    PROBE = 1
    """To ask for health, and for what is served (Handshake); to observe sessions."""
    CLIENT = 2
    """To have sessions, too."""
    OPERATOR = 3
    """Everything: also Shutdown, where the endpoint allows that at all."""

    @property
    def label(self) -> str:
        """As it stands in a token file."""
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
    """Return the value of the metadata entry that shows ``token``.

    Raises:
        ConfigurationError: ``token`` is empty, or holds what gRPC metadata cannot carry.
    """
    is_text = isinstance(token, str)  # from the outside it may be anything
    if not (
        is_text and token and token.isascii() and token.isprintable() and token.strip() == token
    ):
        raise ConfigurationError(
            "the token must be printable ASCII characters, without a space at either end; "
            f"{_REMEDY}"
        )
    return f"Bearer {token}"


def required_role(method: str) -> TokenRole:
    """Return which role a call needs.

    Args:
        method: Its full path, such as ``/rlmesh.env.v1.EnvService/Join``.
    """
    if method.startswith(_PROBED):
        return TokenRole.PROBE
    return _OWN_ROLES.get(method.rpartition("/")[2], TokenRole.CLIENT)


def parse_tokens(data: bytes, source: str) -> tuple[TokenEntry, ...]:
    """Return what a token file says: on each line ``TOKEN`` or ``TOKEN ROLE``.

    A token without a role allows everything. Empty lines and those that begin with ``#`` mean
    nothing.

    Args:
        data: What the file holds.
        source: What errors call it.

    Raises:
        ConfigurationError: A line is malformed, or there is none. It names the line, and never
            quotes it: it may hold a token.
    """
    entries: dict[str, TokenEntry] = {}
    # Not splitlines: what follows a form feed, say, would be a token of its own.
    for number, line in enumerate(data.decode("latin-1").split("\n"), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        entry = _entry(words, f"{source}, line {number}")
        if entries.setdefault(entry.token, entry) != entry:
            raise ConfigurationError(
                f"{source}, line {number}: this token stands there before, with another role; keep "
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
    """Return the token of one endpoint and role; it tells nothing of the secret or of others.

    Whoever knows the secret can work out all of them, so that none has to be handed around.

    Args:
        secret: A fleet's own; never Ray's token.
        endpoint_id: Which endpoint the token opens.
        role: What it allows there.
    """
    # A separator that can be in none of them: no two pairs make the same text.
    text = "\0".join((_PURPOSE, endpoint_id, role))
    digest = hmac.digest(secret.encode(), text.encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
