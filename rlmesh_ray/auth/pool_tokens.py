"""The tokens of a pool: of its registrar, its endpoints, and an endpoint that has users of its own.

Pool and endpoint share a secret that never travels: both derive the tokens from it.
"""

import os
from dataclasses import dataclass, field

from rlmesh_ray.auth.token_file import FileStamp, TokenFile
from rlmesh_ray.auth.tokens import TokenEntry, TokenRole, bearer_value, derive_token
from rlmesh_ray.protocol.pool_membership import fleet_name_of_pool, full_id


@dataclass(frozen=True, slots=True)
class PoolTokenFile(TokenFile):
    """A token file, and the token that the clients of a pool show."""

    pool_token: str = field(repr=False)

    def __init__(self, path: str | os.PathLike[str], pool_token: str) -> None:
        TokenFile.__init__(self, path)
        object.__setattr__(self, "pool_token", pool_token)

    def read(self) -> tuple[tuple[TokenEntry, ...], FileStamp]:
        """Return the file's tokens and the pool's; see ``TokenFile``."""
        entries, stamp = TokenFile.read(self)
        return (*entries, TokenEntry(self.pool_token, TokenRole.CLIENT)), stamp


def registration_token(secret: str) -> str:
    """Return what the registrar of a pool wants to see.

    The pool's name is not in it: whoever has the secret and the wrong name shall be told so.

    Raises:
        ConfigurationError: The secret is nothing that a token file could hold, such as empty.
    """
    bearer_value(secret)
    return derive_token(secret, "pool", "register")


def client_secret(secret: str, pool: str) -> str:
    """Return what the clients of a pool have in place of its secret.

    From it ``derive_token`` makes the token of each endpoint, by its full id. It registers nobody:
    it travels in the configs of trainings, and so into their checkpoints.
    """
    return derive_token(secret, fleet_name_of_pool(pool), "clients")


def endpoint_token(secret: str, pool: str, endpoint_id: str) -> str:
    """Return what an endpoint of a pool wants to see, and no other endpoint does."""
    return derive_token(client_secret(secret, pool), full_id(pool, endpoint_id))
