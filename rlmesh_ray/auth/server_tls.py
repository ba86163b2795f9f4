"""ServerTls: TLS files of a server."""

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rlmesh_ray.auth.client_tls import (
    file_path,
    load_authority,
    load_pair,
    read_pem,
    require_known_key,
)
from rlmesh_ray.auth.ray_credentials import RayTls, require_ray_tls
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.grpc_setup import grpc


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM files for a server's TLS."""

    certificate: Path
    private_key: Path
    client_ca: Path | None
    """If given, clients must present a certificate that this authority signed (mutual TLS)."""

    def __init__(
        self,
        certificate: str | os.PathLike[str],
        private_key: str | os.PathLike[str],
        client_ca: str | os.PathLike[str] | None = None,
    ) -> None:
        object.__setattr__(self, "certificate", file_path("certificate", certificate))
        object.__setattr__(self, "private_key", file_path("private_key", private_key))
        authority = None if client_ca is None else file_path("client_ca", client_ca)
        object.__setattr__(self, "client_ca", authority)

    @classmethod
    def from_ray(cls) -> Self:
        """Return mutual TLS with Ray's files of this node (``RAY_TLS_*``).

        Raises:
            ConfigurationError: Ray does not use TLS here, or a variable is missing.
        """
        return cls(*require_ray_tls())

    def context(self) -> ssl.SSLContext:
        """Load the files into a context of Python's ssl module.

        Raises:
            ConfigurationError: A file cannot be used; the message names it and the remedy.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        load_pair(context, self.certificate, self.private_key)
        if self.client_ca is not None:
            load_authority(context, self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def credentials(self) -> grpc.ServerCredentials:
        """Load the files into gRPC credentials.

        Raises:
            ConfigurationError: A file cannot be used; the message names it and the remedy.
        """
        self.context()
        require_known_key(self.certificate)
        pair = (read_pem(self.private_key), read_pem(self.certificate))
        authority = read_pem(self.client_ca) if self.client_ca else None
        return grpc.ssl_server_credentials([pair], authority, authority is not None)


TlsSource = ServerTls | RayTls
"""Files, or Ray's files on the node where it is used."""


def resolve_server_tls(tls: TlsSource | None) -> ServerTls | None:
    """Return the TLS files on this node; None: no TLS. Raises ConfigurationError."""
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
