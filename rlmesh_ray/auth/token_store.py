"""TokenStore: the tokens that an endpoint accepts, with reloading of its token file."""

import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rlmesh_ray.auth.ray_credentials import ray_tokens
from rlmesh_ray.auth.token_file import FileStamp, TokenFile, TokenSource
from rlmesh_ray.auth.tokens import TokenEntry, TokenRole, bearer_value
from rlmesh_ray.errors import ConfigurationError

_LOG = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0


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
