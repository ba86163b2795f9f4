"""How a client speaks TLS."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rlmesh_ray.auth.pem import client_context, require_known_key
from rlmesh_ray.auth.ray_credentials import RayTls, require_ray_tls
from rlmesh_ray.errors import ConfigurationError

if TYPE_CHECKING:
    from rlmesh_ray.grpc_setup import grpc


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Files in PEM form with which a client speaks TLS."""

    root_ca: Path | None = None
    """Who must have signed the server's certificate; None: the system's authorities."""
    certificate: Path | None = None
    """To show to servers that ask for one; with ``private_key``."""
    private_key: Path | None = None

    @classmethod
    def from_ray(cls) -> Self:
        """Return mutual TLS with the files that Ray uses (``RAY_TLS_*``), which are this node's.

        Raises:
            ConfigurationError: Ray does not use TLS here, or a variable is missing.
        """
        files = require_ray_tls()
        return cls(files.authority, files.certificate, files.private_key)

    def context(self) -> ssl.SSLContext:
        """Read the files and return Python's form of them.

        Raises:
            ConfigurationError: A file cannot be used; the message names it and the remedy.
        """
        return client_context(self.root_ca, self.certificate, self.private_key)

    def credentials(self) -> "grpc.ChannelCredentials":
        """Read the files and return gRPC's form of them.

        Raises:
            ConfigurationError: A file cannot be used; the message names it and the remedy.
        """
        from rlmesh_ray.grpc_setup import grpc  # RLlink's clients do without

        self.context()
        if self.certificate is not None:
            require_known_key(self.certificate)
        root = self.root_ca.read_bytes() if self.root_ca else None
        key = self.private_key.read_bytes() if self.private_key else None
        chain = self.certificate.read_bytes() if self.certificate else None
        return grpc.ssl_channel_credentials(root, key, chain)


ClientTlsSource = ClientTls | RayTls
"""Files, or those that Ray uses on this node."""


def resolve_client_tls(tls: ClientTlsSource | None) -> ClientTls | None:
    """Return the files to speak TLS with on this node; None: plain text.

    Raises:
        ConfigurationError: It is neither of both, or Ray is told to use TLS here, and not with
            which files.
    """
    if isinstance(tls, RayTls):
        files = tls.files()
        return ClientTls(files.authority, files.certificate, files.private_key) if files else None
    if tls is not None and not isinstance(tls, ClientTls):
        raise ConfigurationError(
            f"tls={tls!r} names no files: give ClientTls(authority), or RayTls()"
        )
    return tls
