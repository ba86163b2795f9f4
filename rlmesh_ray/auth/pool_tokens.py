"""Tokens of a pool: for its registrar, for its endpoints, and beside an endpoint's token file.

Pool and endpoints share a secret, which is never sent: both derive the tokens from it.
"""

import os
from dataclasses import dataclass, field

from rlmesh_ray.auth.token_file import FileStamp, TokenFile
from rlmesh_ray.auth.tokens import TokenEntry, TokenRole, bearer_value, derive_token
from rlmesh_ray.protocol.pool_membership import fleet_name_of_pool, full_id


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
    """Return the token that a pool's registrar requires.

    It does not depend on the pool's name, so that an endpoint with the right secret and the wrong
    name gets an error message about the name.

    Raises:
        ConfigurationError: The secret is no valid token, such as an empty one.
    """
    bearer_value(secret)
    return derive_token(secret, "pool", "register")


def client_secret(secret: str, pool: str) -> str:
    """Return the secret for the clients of a pool, which allows no registration.

    ``derive_token`` makes the token of each endpoint from it, by its full id. Training configs, and
    so checkpoints, contain it instead of the pool's secret.
    """
    return derive_token(secret, fleet_name_of_pool(pool), "clients")


def endpoint_token(secret: str, pool: str, endpoint_id: str) -> str:
    """Return the token for the clients of one endpoint of a pool."""
    return derive_token(client_secret(secret, pool), full_id(pool, endpoint_id))
