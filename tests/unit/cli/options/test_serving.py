"""Options of the commands that serve."""

from pathlib import Path

import pytest
import typer

from rlmesh_ray.cli.options.common import parse_env_kwargs
from rlmesh_ray.cli.options.serving import (
    client_options,
    client_scheme,
    server_tls,
    token_fact,
)
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


def test_hints_have_the_options_that_a_server_demands() -> None:
    token, certificate, client_ca = Path("a token"), Path("own.pem"), Path("ca.pem")

    assert client_options(None, None, None, from_ray=False) == ""
    assert (
        client_options(token, certificate, None, from_ray=False)
        == " --token-file 'a token' --tls-ca own.pem"
    )
    assert (
        client_options(token, certificate, None, from_ray=False, prefix="--model-")
        == " --model-token-file 'a token' --model-tls-ca own.pem"
    )
    assert client_options(None, None, None, from_ray=True) == " --tls-from-ray"
    mutual = client_options(None, certificate, client_ca, from_ray=False)
    assert mutual.startswith(" --tls-ca own.pem --tls-cert CERTIFICATE --tls-key KEY  # ")
    assert "signed by ca.pem" in mutual


def test_hints_have_the_scheme_of_a_dialect_that_is_served_alone() -> None:
    assert client_scheme(None) == ""
    assert client_scheme(["rlmesh-wire-v1", "dm_env_rpc.v1"]) == ""
    assert client_scheme(["dm_env_rpc.v1"]) == "dm_env_rpc://"


def test_a_server_says_where_its_token_comes_from() -> None:
    assert token_fact(None, None) == {}
    assert token_fact("t", Path("token")) == {"token": "required"}
    assert token_fact("t", None) == {"token": "required: that of RLMESH_RAY_TOKEN"}
