"""How an endpoint speaks TLS."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rlmesh_ray.auth.pem import require_known_key, server_context
from rlmesh_ray.auth.ray_credentials import RayTls, require_ray_tls
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.grpc_setup import grpc


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Files in PEM form that make an endpoint speak TLS."""

    certificate: Path
    private_key: Path
    client_ca: Path | None = None
    """If given, clients must show a certificate that this authority signed."""

    @classmethod
    def from_ray(cls) -> Self:
        """Return mutual TLS with the files that Ray uses (``RAY_TLS_*``), which are this node's.

        Raises:
            ConfigurationError: Ray does not use TLS here, or a variable is missing.
        """
        return cls(*require_ray_tls())

    def context(self) -> ssl.SSLContext:
        """Read the files and return Python's form of them.

        Raises:
            ConfigurationError: A file cannot be used; the message names it and the remedy.
        """
        return server_context(self.certificate, self.private_key, self.client_ca)

    def credentials(self) -> grpc.ServerCredentials:
        """Read the files and return gRPC's form of them.

        Raises:
            ConfigurationError: A file cannot be used; the message names it and the remedy.
        """
        self.context()
        require_known_key(self.certificate)
        pair = (self.private_key.read_bytes(), self.certificate.read_bytes())
        authority = self.client_ca.read_bytes() if self.client_ca else None
        return grpc.ssl_server_credentials([pair], authority, authority is not None)


TlsSource = ServerTls | RayTls
"""Files, or those that Ray uses on this node."""


def resolve_server_tls(tls: TlsSource | None) -> ServerTls | None:
    """Return the files to speak TLS with on this node; None: plain text.

    Raises:
        ConfigurationError: It is neither of both, a file cannot be used, or one that Ray is to use
            is not named.
    """
    if isinstance(tls, RayTls):
        files = tls.files()
        tls = ServerTls(*files) if files else None
    if tls is None:
        return None
    if not isinstance(tls, ServerTls):
        raise ConfigurationError(
            f"tls={tls!r} names no files: give ServerTls(certificate, private_key), or RayTls()"
        )
    tls.context()
    return tls
