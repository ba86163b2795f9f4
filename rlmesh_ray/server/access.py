"""Who may call an endpoint: tokens and TLS.

The check runs before any handler, so that nothing a stranger sends is parsed.
"""

import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from rlmesh_ray.errors import AddressError
from rlmesh_ray.protocol.address import Address, parse_address
from rlmesh_ray.protocol.capabilities import AUTHORIZATION_METADATA_KEY
from rlmesh_ray.protocol.token import bearer


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Files in PEM form that make an endpoint speak TLS."""

    certificate: Path
    private_key: Path
    client_ca: Path | None = None
    """If given, clients must show a certificate that this authority signed."""

    def credentials(self) -> grpc.ServerCredentials:
        """Read the files and return gRPC's form of them."""
        pair = (self.private_key.read_bytes(), self.certificate.read_bytes())
        authority = self.client_ca.read_bytes() if self.client_ca else None
        return grpc.ssl_server_credentials([pair], authority, authority is not None)


def checked_address(address: str, token: str | None) -> Address:
    """Return where to listen, if an endpoint with this token may.

    Raises:
        AddressError: ``address`` is malformed, or open to strangers without a token.
        ConfigurationError: ``token`` is nothing that a call can carry.
    """
    parsed = parse_address(address)
    check_exposure(parsed, token)
    if token is not None:
        bearer(token)
    return parsed


def check_exposure(address: Address, token: str | None) -> None:
    """Refuse to listen where strangers could reach an endpoint without a token.

    Raises:
        AddressError: ``address`` is not loopback and there is no token.
    """
    if token or address.is_local:
        return
    raise AddressError(
        f"{address} can be reached from other machines: give a token (token=…, --token-file) "
        "or listen on 127.0.0.1"
    )


def is_wildcard(address: Address) -> bool:
    """Tell whether ``address`` means every interface of this machine."""
    try:
        return not address.path and ipaddress.ip_address(address.host).is_unspecified
    except ValueError:
        return False


class TokenGate(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Turns away every call that does not carry the token, as ``Bearer TOKEN`` or alone.

    Raises:
        ConfigurationError: ``token`` is nothing that a call can carry.
    """

    def __init__(self, token: str) -> None:
        self._bearer = bearer(token).encode()
        # As clients of ``rlmesh-wire-v1`` show it.
        self._alone = token.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Pass the call on, or replace its handler by the refusal."""
        metadata = dict(details.invocation_metadata or ())
        shown = str(metadata.get(AUTHORIZATION_METADATA_KEY, "")).encode()
        # Not ``or``: how long it takes must not tell which of them was nearly right.
        is_bearer = hmac.compare_digest(shown, self._bearer)
        if hmac.compare_digest(shown, self._alone) | is_bearer:
            return await continuation(details)
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(_requests: Any, context: grpc.aio.ServicerContext) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED, "this endpoint wants another token (token=…, --token-file)"
    )
