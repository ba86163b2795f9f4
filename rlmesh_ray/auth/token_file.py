"""Token files, which can be replaced while servers and clients run, and their reload by servers."""

import hashlib
import hmac
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rlmesh_ray.auth.pem import file_path
from rlmesh_ray.auth.ray_credentials import ray_tokens
from rlmesh_ray.auth.tokens import TokenEntry, TokenRole, bearer_value, parse_tokens
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.files import open_file

_LOG = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0


_MAX_FILE_BYTES = 64 * 1024
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_HAS_MODES = os.name == "posix"

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
                self._check(status)
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

    def _check(self, status: os.stat_result) -> None:
        if _HAS_MODES and status.st_mode & _OTHERS:
            raise ConfigurationError(
                f"the token file {self.path} is open to other users of this machine "
                f"(mode {stat.S_IMODE(status.st_mode):04o}): chmod 600 {self.path}"
            )


TokenSource = str | TokenFile
"""A token, or a file with tokens."""


def client_token_of(source: TokenSource) -> str:
    """Return the token that a client sends.

    Raises:
        ConfigurationError: The file cannot be used.
    """
    return source.client_token() if isinstance(source, TokenFile) else source


def _stamp(status: os.stat_result) -> FileStamp:
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size


@dataclass(frozen=True, slots=True)
class _StoredToken:
    digest: bytes
    role: TokenRole


class TokenStore:
    """Maps accepted tokens to roles; reloads its file when that changes.

    Only digests are kept. While a changed file is unusable, the former tokens stay valid, and the
    log says why. Use it from one thread at a time.

    Args:
        source: A token, which allows everything, or a token file.
        clock: Monotonic time in seconds.

    Raises:
        ConfigurationError: A token cannot be carried in metadata, or is Ray's own; or the file
            cannot be used.
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
        """Return the role of a token; None where it is not accepted."""
        self._reload_if_changed()
        digest = hashlib.sha256(token).digest()
        found = 0
        # All are compared, so that the duration reveals nothing.
        for known in self._tokens:
            found = max(found, known.role * hmac.compare_digest(known.digest, digest))
        return TokenRole(found) if found else None

    def _reload_if_changed(self) -> None:
        """Reload the file if it has changed; checks at most once a second."""
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
                _LOG.error("the tokens stay as they were: %s", error)
            self._obstacle = str(error)
        else:
            self._obstacle = ""
            _LOG.info("the token file %s has changed: %d token(s)", self._file.path, len(entries))


def _checked(entries: Iterable[TokenEntry], source: str) -> tuple[_StoredToken, ...]:
    foreign = [_digest(token) for token in ray_tokens()]
    known = tuple(_StoredToken(_digest(entry.token), entry.role) for entry in entries)
    if any(hmac.compare_digest(own.digest, ray) for own in known for ray in foreign):
        raise ConfigurationError(
            f"{source} holds Ray's own token, which allows its holder to run code on the cluster; "
            "make another one for endpoints: python -c 'import secrets; "
            "print(secrets.token_urlsafe(32))'"
        )
    return known


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
