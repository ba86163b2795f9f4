"""The token that every call to an endpoint carries."""

from rlmesh_ray.errors import ConfigurationError


def bearer(token: str) -> str:
    """Return the value of the metadata entry that shows ``token``.

    Raises:
        ConfigurationError: ``token`` is empty, or holds what gRPC metadata cannot carry.
    """
    if not (token and token.isascii() and token.isprintable()) or token != token.strip():
        raise ConfigurationError(
            "the token must be printable ASCII characters, without a space at either end; "
            "make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    return f"Bearer {token}"
