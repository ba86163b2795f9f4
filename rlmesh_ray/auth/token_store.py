"""The tokens that an endpoint takes, as they are now."""

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
    """Tells what role somebody has who shows a token; follows its file.

    Only digests are kept. When a file has become unusable, the tokens that it held before go on
    counting until it is usable again, and the log says why. To be used from one thread at a time.

    Args:
        source: The token, which allows everything, or the file with tokens.
        clock: Seconds that only grow.

    Raises:
        ConfigurationError: A token is nothing that a call can carry, or is Ray's own; or the file
            cannot be used.
    """

    def __init__(self, source: TokenSource, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._file = source if isinstance(source, TokenFile) else None
        self._stamp: FileStamp | None = None
        # Why the file could not be used when it was looked at last; empty: it could.
        self._obstacle = ""
        if isinstance(source, TokenFile):
            entries, self._stamp = source.read()
        else:
            bearer_value(source)
            entries = (TokenEntry(source),)
        self._tokens = _checked(entries, str(self._file.path) if self._file else "the token")
        self._looked_s = clock()

    def role_of(self, shown: bytes) -> TokenRole | None:
        """Return what the token ``shown`` allows; None: it is none of ours."""
        self._reload_if_changed()
        digest = hashlib.sha256(shown).digest()
        found = 0
        # All of them, whatever has matched: the time tells nothing.
        for known in self._tokens:
            found = max(found, known.role * hmac.compare_digest(known.digest, digest))
        return TokenRole(found) if found else None

    def _reload_if_changed(self) -> None:
        """Read the file anew if it has changed; looks at most once a second."""
        if self._file is None or self._clock() - self._looked_s < _LOOK_AGAIN_S:
            return
        self._looked_s = self._clock()
        # The stamp of what was read last: what could not be read is tried again each time. It may
        # have been for the disk, or for this process, which had no descriptor left.
        if self._file.stamp() == self._stamp:
            self._obstacle = ""
            return
        try:
            entries, self._stamp = self._file.read()
            self._tokens = _checked(entries, str(self._file.path))
        except ConfigurationError as error:
            # Once, not every second.
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
            f"{source} holds Ray's own token, which lets whoever has it run code on the cluster; "
            "make another one for endpoints: python -c 'import secrets; "
            "print(secrets.token_urlsafe(32))'"
        )
    return known


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
