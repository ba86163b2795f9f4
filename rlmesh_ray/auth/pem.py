"""Validation of PEM files, by loading them into an ssl.SSLContext.

gRPC reads the files itself, but reports a bad one as an address that cannot be used.
"""

import os
import ssl
from pathlib import Path

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.files import read_file

_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_ELLIPTIC = bytes.fromhex("06072a8648ce3d0201")
# DER encodings of the key types that BoringSSL supports: RSA, P-256, P-384.
_KNOWN_KEYS = (
    bytes.fromhex("06092a864886f70d010101"),
    _ELLIPTIC + bytes.fromhex("06082a8648ce3d030107"),
    _ELLIPTIC + bytes.fromhex("06052b81040022"),
)


def file_path(name: str, value: str | os.PathLike[str]) -> Path:
    """Return an option that names a file.

    Raises:
        ConfigurationError: It is neither a str nor a path.
    """
    if not isinstance(value, str | os.PathLike):
        raise ConfigurationError(
            f"{name}={value!r:.40} names no file; give its path, as str or Path"
        )
    return Path(value)


def read_pem(file: Path) -> bytes:
    """Return the content of a file.

    Raises:
        ConfigurationError: It cannot be read, or it is not a regular file.
    """
    try:
        return read_file(file)
    except OSError as error:
        raise ConfigurationError(
            f"{file} cannot be read ({error}); name a file in PEM form that you may read"
        ) from error


def server_context(
    certificate: Path, private_key: Path, client_ca: Path | None = None
) -> ssl.SSLContext:
    """Return the TLS context of a server.

    Args:
        certificate: The server's certificate chain.
        private_key: Private key of the certificate.
        client_ca: Authority of the clients' certificates; None: clients need none.

    Raises:
        ConfigurationError: A file cannot be used; the message names it and the remedy.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_pair(context, certificate, private_key)
    if client_ca is not None:
        _load_authority(context, client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(
    root_ca: Path | None = None, certificate: Path | None = None, private_key: Path | None = None
) -> ssl.SSLContext:
    """Return the TLS context of a client.

    Args:
        root_ca: Authority of the server's certificate; None: the system's authorities.
        certificate: The client's certificate, for servers that require one.
        private_key: Private key of the certificate.

    Raises:
        ConfigurationError: A file cannot be used, or only one of certificate and key is given.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if root_ca is None:
        context.load_default_certs()
    else:
        _load_authority(context, root_ca)
    if certificate is not None and private_key is not None:
        _load_pair(context, certificate, private_key)
    elif certificate is not None or private_key is not None:
        raise ConfigurationError(
            "a client certificate needs both files: the certificate (--tls-cert) and "
            "its key (--tls-key)"
        )
    return context


def require_known_key(certificate: Path) -> None:
    """Require a key type that BoringSSL supports; gRPC loads others, and each TLS handshake fails.

    Raises:
        ConfigurationError: The certificate has another type of key.
    """
    head, end, _ = read_pem(certificate).decode("latin-1").partition(_END)
    leaf = ssl.PEM_cert_to_DER_cert(head[head.index(_BEGIN) :] + end)
    if not any(kind in leaf for kind in _KNOWN_KEYS):
        raise ConfigurationError(
            f"{certificate} has a key of a kind that gRPC does not know; use a certificate with "
            "an RSA key, or an elliptic one on the curve P-256 or P-384"
        )


def _load_pair(context: ssl.SSLContext, certificate: Path, private_key: Path) -> None:
    try:
        for file in (certificate, private_key):
            read_file(file)  # OpenSSL would wait for a pipe's writer
        # With an empty password OpenSSL does not prompt at the terminal.
        context.load_cert_chain(certificate, private_key, password="")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{certificate} and {private_key} are no certificate and its key in PEM form, without "
            f"a password ({error}); name two matching files that you may read"
        ) from error


def _load_authority(context: ssl.SSLContext, authority: Path) -> None:
    try:
        read_file(authority)
        context.load_verify_locations(authority)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{authority} is no certificate in PEM form ({error}); name the authority's, in a file "
            "that you may read"
        ) from error
