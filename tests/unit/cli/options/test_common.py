from pathlib import Path

import pytest
import typer

from rlmesh_ray.auth.token_file import TokenFile
from rlmesh_ray.cli.options.common import TOKEN_VARIABLE, client_tls, read_token
from rlmesh_ray.errors import ConfigurationError


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


def test_without_file_and_variable_there_is_no_token() -> None:
    assert read_token(None) is None


def test_the_variable_is_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")

    assert read_token(None) == "s3cret"


def test_the_file_overrides_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")
    (tmp_path / "token").write_text("from-file\n")
    (tmp_path / "token").chmod(0o600)

    source = read_token(tmp_path / "token")

    assert source == TokenFile(tmp_path / "token")
    assert source.client_token() == "from-file"


def test_a_variable_that_no_header_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "two words")

    with pytest.raises(ConfigurationError, match=TOKEN_VARIABLE):
        read_token(None)


@pytest.mark.parametrize("text", ["", "\n", "two words", "sécret"])
def test_a_token_that_no_header_can_hold_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(text)
    (tmp_path / "token").chmod(0o600)

    with pytest.raises(ConfigurationError, match="token"):
        read_token(tmp_path / "token")


def test_without_files_there_is_no_tls() -> None:
    assert client_tls(None) is None


def test_a_clients_certificate_needs_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--tls-cert.*--tls-key"):
        client_tls(None, tmp_path / "client.pem")


def test_rays_files_exclude_other_files(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="leave out"):
        client_tls(tmp_path / "file.pem", from_ray=True)


def test_missing_files_of_ray_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)

    with pytest.raises(ConfigurationError, match="RAY_USE_TLS=1"):
        client_tls(None, from_ray=True)


def test_files_that_are_no_certificates_are_named(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")

    with pytest.raises(ConfigurationError, match=r"wrong\.pem"):
        client_tls(wrong)
