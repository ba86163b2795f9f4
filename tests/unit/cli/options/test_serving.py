"""Options of the commands that serve."""

from pathlib import Path

import pytest
import typer

from rlmesh_ray.cli.options.common import parse_env_kwargs
from rlmesh_ray.cli.options.serving import server_tls
from rlmesh_ray.errors import ConfigurationError


def test_env_kwargs_are_a_json_object() -> None:
    assert parse_env_kwargs(None) is None
    assert parse_env_kwargs('{"sutton_barto_reward": true}') == {"sutton_barto_reward": True}


@pytest.mark.parametrize("text", ["{a", "[1]", "null", ""])
def test_env_kwargs_of_another_kind_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="JSON"):
        parse_env_kwargs(text)


def test_a_server_without_files_speaks_no_tls() -> None:
    assert server_tls(None, None) is None


@pytest.mark.parametrize("given", [0, 1])
def test_a_certificate_needs_its_key(given: int, tmp_path: Path) -> None:
    files: list[Path | None] = [None, None]
    files[given] = tmp_path / "file.pem"

    with pytest.raises(typer.BadParameter, match=r"--tls-cert and --tls-key"):
        server_tls(*files)


def test_clients_certificates_are_checked_only_by_a_server_with_its_own(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="needs its own"):
        server_tls(None, None, tmp_path / "ca.pem")


def test_rays_files_exclude_other_files_of_a_server(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="leave out"):
        server_tls(tmp_path / "file.pem", None, from_ray=True)


def test_missing_files_of_ray_are_an_error_for_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)

    with pytest.raises(ConfigurationError, match="RAY_USE_TLS=1"):
        server_tls(None, None, from_ray=True)


def test_files_that_are_no_certificate_of_a_server_are_named(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")

    with pytest.raises(ConfigurationError, match=r"wrong\.pem"):
        server_tls(wrong, wrong)
