"""ClientTls: TLS files of a client."""

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rlmesh_ray.auth.pem import client_context, file_path, read_pem, require_known_key
from rlmesh_ray.auth.ray_credentials import RayTls, require_ray_tls
from rlmesh_ray.errors import ConfigurationError

if TYPE_CHECKING:
    from rlmesh_ray.grpc_setup import grpc


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files for a client's TLS."""

    root_ca: Path | None
    """Authority of the server's certificate; None: the system's authorities."""
    certificate: Path | None
    """The client's certificate, for servers that require one; with ``private_key``."""
    private_key: Path | None

    def __init__(
        self,
        root_ca: str | os.PathLike[str] | None = None,
        certificate: str | os.PathLike[str] | None = None,
        private_key: str | os.PathLike[str] | None = None,
    ) -> None:
        files = {"root_ca": root_ca, "certificate": certificate, "private_key": private_key}
        for name, file in files.items():
            object.__setattr__(self, name, None if file is None else file_path(name, file))

    @classmethod
    def from_ray(cls) -> Self:
        """Return mutual TLS with Ray's files of this node (``RAY_TLS_*``).

        Raises:
            ConfigurationError: Ray does not use TLS here, or a variable is missing.
        """
        files = require_ray_tls()
        return cls(files.authority, files.certificate, files.private_key)

    def context(self) -> ssl.SSLContext:
        """Load the files into a context of Python's ssl module.

        Raises:
            ConfigurationError: A file cannot be used; the message names it and the remedy.
        """
        return client_context(self.root_ca, self.certificate, self.private_key)

    def credentials(self) -> "grpc.ChannelCredentials":
        """Load the files into gRPC credentials.

        Raises:
            ConfigurationError: A file cannot be used; the message names it and the remedy.
        """
        from rlmesh_ray.grpc_setup import grpc  # RLlink's clients do not need it

        self.context()
        if self.certificate is not None:
            require_known_key(self.certificate)
        root = read_pem(self.root_ca) if self.root_ca else None
        key = read_pem(self.private_key) if self.private_key else None
        chain = read_pem(self.certificate) if self.certificate else None
        return grpc.ssl_channel_credentials(root, key, chain)


ClientTlsSource = ClientTls | RayTls
"""Files, or Ray's files on the node where it is used."""


def resolve_client_tls(tls: ClientTlsSource | None) -> ClientTls | None:
    """Return the TLS files on this node; None: no TLS.

    Raises:
        ConfigurationError: ``tls`` is of another type, or Ray's TLS is enabled and its files are
            not named.
    """
    if isinstance(tls, RayTls):
        files = tls.files()
        return ClientTls(files.authority, files.certificate, files.private_key) if files else None
    if tls is not None and not isinstance(tls, ClientTls):
        raise ConfigurationError(
            f"tls={tls!r} names no files: give ClientTls(root_ca=FILE), or RayTls()"
        )
    return tls
