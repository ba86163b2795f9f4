"""ClientTls: TLS files of a client; and the loading of PEM files, which both sides do.

Files are first loaded into an ``ssl.SSLContext``: gRPC reads them itself, but reports a bad one as
an address that cannot be used.
"""

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rlmesh_ray.auth.ray_credentials import RayTls, require_ray_tls
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.files import read_file

if TYPE_CHECKING:
    from rlmesh_ray.grpc_setup import grpc

_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_ELLIPTIC = bytes.fromhex("06072a8648ce3d0201")
# DER encodings of the key types that BoringSSL supports: RSA, P-256, P-384.
_KNOWN_KEYS = (
    bytes.fromhex("06092a864886f70d010101"),
    _ELLIPTIC + bytes.fromhex("06082a8648ce3d030107"),
    _ELLIPTIC + bytes.fromhex("06052b81040022"),
)


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
            ConfigurationError: A file cannot be used, or only one of certificate and key is given;
                the message names it and the remedy.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.root_ca is None:
            context.load_default_certs()
        else:
            load_authority(context, self.root_ca)
        if self.certificate is not None and self.private_key is not None:
            load_pair(context, self.certificate, self.private_key)
        elif self.certificate is not None or self.private_key is not None:
            raise ConfigurationError(
                "a client certificate needs both files: the certificate (--tls-cert) and "
                "its key (--tls-key)"
            )
        return context

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
    """Return the TLS files on this node; None: no TLS. Raises ConfigurationError."""
    if isinstance(tls, RayTls):
        files = tls.files()
        return ClientTls(files.authority, files.certificate, files.private_key) if files else None
    if tls is not None and not isinstance(tls, ClientTls):
        raise ConfigurationError(
            f"tls={tls!r} names no files: give ClientTls(root_ca=FILE), or RayTls()"
        )
    return tls


def file_path(name: str, value: str | os.PathLike[str]) -> Path:
    """Return an option that names a file; raises ConfigurationError for anything else."""
    if not isinstance(value, str | os.PathLike):
        raise ConfigurationError(
            f"{name}={value!r:.40} names no file; give its path, as str or Path"
        )
    return Path(value)


def read_pem(file: Path) -> bytes:
    """Return the content of a regular file; raises ConfigurationError."""
    try:
        return read_file(file)
    except OSError as error:
        raise ConfigurationError(
            f"{file} cannot be read ({error}); name a file in PEM form that you may read"
        ) from error


def load_pair(context: ssl.SSLContext, certificate: Path, private_key: Path) -> None:
    try:
        for file in (certificate, private_key):
            read_file(file)  # OpenSSL would wait for a pipe's writer
        # With an empty password OpenSSL does not prompt at the terminal.
        context.load_cert_chain(certificate, private_key, password="")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{certificate} and {private_key} are not a certificate and its key in PEM form "
            f"without a password ({error}); name two matching files that you may read"
        ) from error


def load_authority(context: ssl.SSLContext, authority: Path) -> None:
    try:
        read_file(authority)
        context.load_verify_locations(authority)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{authority} is not a certificate in PEM form ({error}); name that of the authority, "
            "in a file that you may read"
        ) from error


def require_known_key(certificate: Path) -> None:
    """Raise ConfigurationError for a type of key that BoringSSL does not support.

    gRPC loads such a key, and then each TLS handshake fails.
    """
    head, end, _ = read_pem(certificate).decode("latin-1").partition(_END)
    leaf = ssl.PEM_cert_to_DER_cert(head[head.index(_BEGIN) :] + end)
    if not any(kind in leaf for kind in _KNOWN_KEYS):
        raise ConfigurationError(
            f"{certificate} has a key of a kind that gRPC does not know; use a certificate with "
            "an RSA key, or an elliptic one on the curve P-256 or P-384"
        )
