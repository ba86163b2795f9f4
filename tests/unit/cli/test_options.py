from pathlib import Path

import pytest
import typer

from rlmesh_ray.cli.options import (
    TOKEN_VARIABLE,
    client_tls,
    parse_env_kwargs,
    read_token,
    server_tls,
)
from rlmesh_ray.errors import ConfigurationError


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


def test_without_file_and_variable_there_is_no_token() -> None:
    assert read_token(None) is None


def test_the_variable_is_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")

    assert read_token(None) == "s3cret"


def test_the_file_goes_before_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")
    (tmp_path / "token").write_text("from-file\n")

    assert read_token(tmp_path / "token") == "from-file"


@pytest.mark.parametrize("text", ["", "\n", "two words", "two\nlines", "sécret"])
def test_a_token_that_cannot_travel_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(text)

    with pytest.raises(ConfigurationError, match="token"):
        read_token(tmp_path / "token")


def test_env_kwargs_are_a_json_object() -> None:
    assert parse_env_kwargs(None) is None
    assert parse_env_kwargs('{"sutton_barto_reward": true}') == {"sutton_barto_reward": True}


@pytest.mark.parametrize("text", ["{a", "[1]", "null", ""])
def test_env_kwargs_of_another_kind_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="JSON"):
        parse_env_kwargs(text)


def test_without_files_there_is_no_tls() -> None:
    assert server_tls(None, None) is None
    assert client_tls(None) is None


@pytest.mark.parametrize("given", [0, 1])
def test_a_certificate_needs_its_key(given: int, tmp_path: Path) -> None:
    files: list[Path | None] = [None, None]
    files[given] = tmp_path / "file.pem"

    with pytest.raises(typer.BadParameter, match=r"--tls-cert and --tls-key"):
        server_tls(*files)


def test_files_that_are_no_certificates_are_named(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")

    with pytest.raises(ConfigurationError, match=r"wrong\.pem"):
        server_tls(wrong, wrong)
    with pytest.raises(ConfigurationError, match=r"wrong\.pem"):
        client_tls(wrong)
