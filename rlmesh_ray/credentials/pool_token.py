"""The tokens of an endpoint that is in a pool and has users of its own."""

import os
from dataclasses import dataclass, field

from rlmesh_ray.credentials.token_file import Stamp, TokenFile
from rlmesh_ray.protocol.token import Role, TokenEntry


@dataclass(frozen=True, slots=True)
class PoolTokenFile(TokenFile):
    """A token file, and the token that the clients of a pool show."""

    pool_token: str = field(repr=False)

    def __init__(self, path: str | os.PathLike[str], pool_token: str) -> None:
        TokenFile.__init__(self, path)
        object.__setattr__(self, "pool_token", pool_token)

    def read(self) -> tuple[tuple[TokenEntry, ...], Stamp]:
        """Return the file's tokens and the pool's; see ``TokenFile``."""
        entries, stamp = TokenFile.read(self)
        return (*entries, TokenEntry(self.pool_token, Role.CLIENT)), stamp
