"""TokenFile: tokens that lie in a file, so that they can be replaced while everything runs."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from rlmesh_ray.auth.tokens import TokenEntry, TokenRole, parse_tokens
from rlmesh_ray.errors import ConfigurationError

_MAX_FILE_BYTES = 64 * 1024
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_HAS_MODES = os.name == "posix"

FileStamp = tuple[int, int, int, int]
"""What changes when somebody writes a file, replaces it or changes its mode: times, inode, size."""


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A file with one token a line, each with its role if it has one: ``TOKEN`` or ``TOKEN ROLE``.

    Roles are ``probe`` (asks for health, and for what is served), ``client`` (has sessions, too)
    and ``operator`` (everything, also Shutdown); without one a token allows everything. Empty
    lines and those that begin with ``#`` mean nothing. Nobody but the file's owner may have any
    right to it (``chmod 600``); Windows is not asked. A symbolic link counts as what it leads to.

    A server takes all tokens of its file, and notices within about a second that it has changed.
    A client shows the first one that is not a probe's, as it stands there when it dials. So a token
    is replaced by writing the new one beside the old one into the server's file, then into the
    clients', and by taking the old one away: no session is disturbed. Replace files as a whole
    (write another one and rename it), so that nobody reads half of one.

    It pickles as a path: the file must be there where it is used.
    """

    path: Path

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # Absolute: what runs elsewhere has another working directory.
        object.__setattr__(self, "path", Path(path).absolute())

    def read(self) -> tuple[tuple[TokenEntry, ...], FileStamp]:
        """Return what it holds now, and its stamp at that time.

        Raises:
            ConfigurationError: It cannot be read, others may read it, or it is malformed.
        """
        try:
            # What is checked is what is read, and a pipe does not hold us up.
            descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
            try:
                status = os.fstat(descriptor)
                self._check(status)
                # Python would leave a directory's descriptor open, and who retries has many.
                with open(descriptor, "rb", closefd=False) as file:
                    data = file.read(_MAX_FILE_BYTES + 1)
            finally:
                os.close(descriptor)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ConfigurationError(f"cannot read the token file {self.path}: {reason}") from error
        if len(data) > _MAX_FILE_BYTES:
            raise ConfigurationError(
                f"the token file {self.path} is larger than {_MAX_FILE_BYTES} bytes; write one "
                "token a line into it, and nothing else"
            )
        return parse_tokens(data, f"the token file {self.path}"), _stamp(status)

    def stamp(self) -> FileStamp | None:
        """Return what tells whether it has changed; None while it is not there."""
        try:
            return _stamp(os.stat(self.path))
        except OSError:
            return None

    def client_token(self) -> str:
        """Return what a client shows now: the first token that is not a probe's, if there is one.

        Raises:
            ConfigurationError: As ``read``.
        """
        entries, _ = self.read()
        able = [entry.token for entry in entries if entry.role >= TokenRole.CLIENT]
        return able[0] if able else entries[0].token

    def _check(self, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise ConfigurationError(f"the token file {self.path} is not a regular file")
        if _HAS_MODES and status.st_mode & _OTHERS:
            raise ConfigurationError(
                f"the token file {self.path} is open to others on this machine "
                f"(mode {stat.S_IMODE(status.st_mode):04o}): chmod 600 {self.path}"
            )


TokenSource = str | TokenFile
"""A token, or where it stands."""


def client_token_of(source: TokenSource) -> str:
    """Return the token that a client shows now.

    Raises:
        ConfigurationError: Its file cannot be used.
    """
    return source.client_token() if isinstance(source, TokenFile) else source


def _stamp(status: os.stat_result) -> FileStamp:
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size
