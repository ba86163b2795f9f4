"""Token files, which can be replaced while servers and clients run, and their reload by servers."""

import base64
import enum
import hashlib
import hmac
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rlmesh_ray.auth.client_tls import file_path
from rlmesh_ray.auth.ray_credentials import ray_tokens
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.files import open_file
from rlmesh_ray.protocol.pool_membership import fleet_name_of_pool, full_id

_LOG = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0
_MAX_FILE_BYTES = 64 * 1024
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_HAS_MODES = os.name == "posix"
_PURPOSE = "rlmesh_ray.token.v1"
_COMMAND = "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
_REMEDY = f"make one with: {_COMMAND}"


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
    """Return the value of ``authorization``; raises ConfigurationError for a malformed token."""
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
    """Return the role for a call's full path, such as ``/rlmesh.env.v1.EnvService/Join``."""
    if method.startswith(_PROBED):
        return TokenRole.PROBE
    return _OWN_ROLES.get(method.rpartition("/")[2], TokenRole.CLIENT)


def parse_tokens(data: bytes, source: str) -> tuple[TokenEntry, ...]:
    """Return the entries of a token file (see ``TokenFile``), called ``source`` in errors.

    Raises ConfigurationError: it names the line and never quotes it, which may contain a token.
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

    Each party that has the secret, which is never Ray's token, derives the tokens itself; a token
    reveals neither the secret nor another token.
    """
    # None of the parts can contain the separator, so different parts give different texts.
    text = "\0".join((_PURPOSE, endpoint_id, role))
    digest = hmac.digest(secret.encode(), text.encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


FileStamp = tuple[int, int, int, int]
"""mtime, ctime, inode and size: changes when a file is written, replaced or changes its mode."""


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A file with one token on each line, optionally with a role: ``TOKEN`` or ``TOKEN ROLE``.

    Roles are ``probe`` (health checks and Handshake), ``client`` (sessions, too) and ``operator``
    (everything, also Shutdown, which is the default). Empty lines and lines that begin with ``#``
    are ignored. Only the file's owner may have access (``chmod 600``; not checked on Windows).
    Symbolic links are followed.

    A server accepts all tokens of its file, and reloads it within about a second after a change. A
    client sends the first token that is not a probe's, read when it connects. To rotate a token,
    add the new one to the server's file, then replace it in the clients', then remove the old one:
    no session is disturbed. Replace files as a whole (write a new one and rename it), so that no
    reader gets half a file.

    It pickles as a path: the file must exist where it is used.
    """

    path: Path

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # Absolute, since other processes have other working directories.
        object.__setattr__(self, "path", file_path("path", path).absolute())

    def read(self) -> tuple[tuple[TokenEntry, ...], FileStamp]:
        """Return the present entries, and the stamp of the file that they were read from.

        Raises:
            ConfigurationError: It cannot be read, is open to other users, or is malformed.
        """
        try:
            with open_file(self.path) as file:  # one descriptor for check and read
                status = os.fstat(file.fileno())
                if _HAS_MODES and status.st_mode & _OTHERS:
                    raise ConfigurationError(
                        f"the token file {self.path} is open to other users of this machine "
                        f"(mode {stat.S_IMODE(status.st_mode):04o}): chmod 600 {self.path}"
                    )
                data = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ConfigurationError(f"cannot read the token file {self.path}: {reason}") from error
        if len(data) > _MAX_FILE_BYTES:
            raise ConfigurationError(
                f"the token file {self.path} is larger than {_MAX_FILE_BYTES} bytes; it should "
                "contain only tokens, one on each line"
            )
        return parse_tokens(data, f"the token file {self.path}"), _stamp(status)

    def stamp(self) -> FileStamp | None:
        """Return the present stamp of the file; None while it does not exist."""
        try:
            return _stamp(os.stat(self.path))
        except OSError:
            return None

    def client_token(self) -> str:
        """Return the token that a client sends: the first without the role `probe`, else the first.

        Raises:
            ConfigurationError: As ``read``.
        """
        entries, _ = self.read()
        client_tokens = [entry.token for entry in entries if entry.role >= TokenRole.CLIENT]
        return client_tokens[0] if client_tokens else entries[0].token


TokenSource = str | TokenFile
"""A token, or a file with tokens."""
ServerToken = TokenSource | Literal[False] | None
"""What an endpoint asks of its clients. None: nothing, on loopback; False: nothing, on purpose."""


def client_token_of(source: TokenSource) -> str:
    return source.client_token() if isinstance(source, TokenFile) else source


def _stamp(status: os.stat_result) -> FileStamp:
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size


class TokenStore:
    """Maps accepted tokens to roles; reloads its file when that changes.

    Only digests are kept. While a changed file is unusable, the former tokens stay valid, and the
    log says why. Use it from one thread at a time. A token that metadata cannot carry, Ray's own
    one, and an unusable file raise ConfigurationError.
    """

    def __init__(self, source: TokenSource, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._file = source if isinstance(source, TokenFile) else None
        self._stamp: FileStamp | None = None
        # Why the last reload failed; empty: it did not.
        self._obstacle = ""
        if isinstance(source, TokenFile):
            entries, self._stamp = source.read()
        else:
            bearer_value(source)
            entries = (TokenEntry(source),)
        self._tokens = _checked(entries, str(self._file.path) if self._file else "the token")
        self._looked_s = clock()

    def role_of(self, token: bytes) -> TokenRole | None:
        self._reload_if_changed()
        digest = hashlib.sha256(token).digest()
        found = 0
        # All are compared, so that the duration reveals nothing.
        for known, role in self._tokens:
            found = max(found, role * hmac.compare_digest(known, digest))
        return TokenRole(found) if found else None

    def _reload_if_changed(self) -> None:
        if self._file is None or self._clock() - self._looked_s < _LOOK_AGAIN_S:
            return
        self._looked_s = self._clock()
        # The stamp changes only with a successful read: failures, as of the disk or for want of a
        # descriptor, are tried again each time.
        if self._file.stamp() == self._stamp:
            self._obstacle = ""
            return
        try:
            entries, self._stamp = self._file.read()
            self._tokens = _checked(entries, str(self._file.path))
        except ConfigurationError as error:
            # Logged once, not every second.
            if self._obstacle != str(error):
                _LOG.error("the previous tokens stay in use: %s", error)
            self._obstacle = str(error)
        else:
            self._obstacle = ""
            _LOG.info("the token file %s has changed: %d token(s)", self._file.path, len(entries))


def token_store(token: ServerToken) -> TokenStore | None:
    """Return the tokens of an endpoint; None: it asks for none. Raises ConfigurationError."""
    return None if token is None or token is False else TokenStore(token)


def _checked(entries: Iterable[TokenEntry], source: str) -> tuple[tuple[bytes, TokenRole], ...]:
    foreign = [_digest(token) for token in ray_tokens()]
    known = tuple((_digest(entry.token), entry.role) for entry in entries)
    if any(hmac.compare_digest(own, ray) for own, _ in known for ray in foreign):
        raise ConfigurationError(
            f"{source} holds Ray's own token, which allows its holder to run code on the cluster; "
            f"make another one for endpoints: {_COMMAND}"
        )
    return known


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


@dataclass(frozen=True, slots=True)
class PoolTokenFile(TokenFile):
    """A token file, and the token of the pool's clients."""

    pool_token: str = field(repr=False)

    def __init__(self, path: str | os.PathLike[str], pool_token: str) -> None:
        TokenFile.__init__(self, path)
        object.__setattr__(self, "pool_token", pool_token)

    def read(self) -> tuple[tuple[TokenEntry, ...], FileStamp]:
        """Return the file's tokens and the pool's; see ``TokenFile``."""
        entries, stamp = TokenFile.read(self)
        return (*entries, TokenEntry(self.pool_token, TokenRole.CLIENT)), stamp


def registration_token(secret: str) -> str:
    """Return the token that a pool's registrar requires; raises ConfigurationError.

    It does not depend on the pool's name, so that an endpoint with the right secret and the wrong
    name gets an error message about the name.
    """
    bearer_value(secret)
    return derive_token(secret, "pool", "register")


def client_secret(secret: str, pool: str) -> str:
    """Return the secret for the clients of a pool, which allows no registration.

    Training configs, and so checkpoints, contain it instead of the pool's secret.
    """
    return derive_token(secret, fleet_name_of_pool(pool), "clients")


def endpoint_token(secret: str, pool: str, endpoint_id: str) -> str:
    return derive_token(client_secret(secret, pool), full_id(pool, endpoint_id))
