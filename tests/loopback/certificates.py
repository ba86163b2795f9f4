"""Throw-away authorities and certificates for this host, made with openssl."""

import shutil
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="makes its certificates with openssl"
)

_TIMEOUT_S = 30
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def certified(folder: Path, *key: str) -> tuple[Path, Path]:
    """Return a certificate for this host that has signed itself, and its key.

    Args:
        folder: Where they are written.
        key: What kind, as ``openssl req -newkey`` takes it, with its options.
    """
    _openssl(
        folder, "req", "-x509", "-newkey", *key, "-nodes", "-days", "2", "-subj", "/CN=itself",
        "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "itself.key", "-out", "itself.pem",
    )  # fmt: skip
    return folder / "itself.pem", folder / "itself.key"


class Authority:
    """Signs certificates for 127.0.0.1.

    Args:
        folder: Where everything is written.
        name: Of the authority.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self.certificate = folder / f"{name}.pem"
        _openssl(
            folder, "req", "-x509", *_NEW_KEY, "-days", "2", "-subj", f"/CN={name}",
            "-keyout", f"{name}.key", "-out", f"{name}.pem",
        )  # fmt: skip

    def sign(
        self, name: str, *, has_expired: bool = False, host: str = "127.0.0.1"
    ) -> tuple[Path, Path]:
        """Return a certificate for this host, which is also known as ``host``, and its key."""
        names = ",".join(f"IP:{each}" for each in sorted({"127.0.0.1", host}))
        _openssl(
            self._folder, "req", *_NEW_KEY, "-subj", f"/CN={name}",
            "-addext", f"subjectAltName={names}", "-keyout", f"{name}.key",
            "-out", f"{name}.csr",
        )  # fmt: skip
        _openssl(
            self._folder, "x509", "-req", "-in", f"{name}.csr", "-CA", f"{self._name}.pem",
            "-CAkey", f"{self._name}.key", "-CAcreateserial", "-copy_extensions", "copy",
            "-days", "-1" if has_expired else "2", "-out", f"{name}.pem",
        )  # fmt: skip
        return self._folder / f"{name}.pem", self._folder / f"{name}.key"


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(
        ["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=_TIMEOUT_S
    )
