from pathlib import Path

import pytest
import typer

from rlmesh_ray.auth.token_file import TokenFile
from rlmesh_ray.cli.commands.train import RunnerRecordingFlags
from rlmesh_ray.cli.options.common import (
    TOKEN_VARIABLE,
    ClientSecurity,
    EndpointSecurity,
    MadeEnvFlags,
    RecordingFlags,
    ServerSecurity,
    client_scheme,
    client_tls,
    read_token,
)
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.recording import RecordOptions


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
    assert ClientSecurity().tls() is None


def test_a_clients_certificate_needs_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--tls-cert.*--tls-key"):
        client_tls(None, tmp_path / "client.pem")


def test_rays_files_exclude_other_files(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="leave out"):
        ClientSecurity(tls_ca=tmp_path / "file.pem", tls_from_ray=True).tls()


def test_missing_files_of_ray_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)

    with pytest.raises(ConfigurationError, match="RAY_USE_TLS=1"):
        ClientSecurity(tls_from_ray=True).tls()


def test_files_that_are_no_certificates_are_named(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")

    with pytest.raises(ConfigurationError, match=r"wrong\.pem"):
        client_tls(wrong)


def test_env_kwargs_are_a_json_object() -> None:
    assert MadeEnvFlags().kwargs() is None
    assert MadeEnvFlags('{"sutton_barto_reward": true}').kwargs() == {"sutton_barto_reward": True}


@pytest.mark.parametrize("text", ["{a", "[1]", "null", ""])
def test_env_kwargs_of_another_kind_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="JSON"):
        MadeEnvFlags(text).kwargs()


def test_a_server_without_files_speaks_no_tls() -> None:
    assert ServerSecurity().tls() is None


@pytest.mark.parametrize("given", [0, 1])
def test_a_certificate_needs_its_key(given: int, tmp_path: Path) -> None:
    file = tmp_path / "file.pem"
    pair = (file, None) if given == 0 else (None, file)

    with pytest.raises(typer.BadParameter, match=r"--tls-cert and --tls-key"):
        ServerSecurity(None, *pair).tls()


def test_clients_certificates_are_checked_only_by_a_server_with_its_own(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="needs its own"):
        ServerSecurity(tls_client_ca=tmp_path / "ca.pem").tls()


def test_rays_files_exclude_other_files_of_a_server(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="leave out"):
        ServerSecurity(tls_cert=tmp_path / "file.pem", tls_from_ray=True).tls()


def test_missing_files_of_ray_are_an_error_for_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)

    with pytest.raises(ConfigurationError, match="RAY_USE_TLS=1"):
        ServerSecurity(tls_from_ray=True).tls()


def test_files_that_are_no_certificate_of_a_server_are_named(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")

    with pytest.raises(ConfigurationError, match=r"wrong\.pem"):
        ServerSecurity(tls_cert=wrong, tls_key=wrong).tls()


def test_hints_have_the_options_that_a_server_demands() -> None:
    token, certificate, client_ca = Path("a token"), Path("own.pem"), Path("ca.pem")

    assert ServerSecurity().of_clients() == ""
    one = ServerSecurity(token_file=token, tls_cert=certificate)
    assert one.of_clients() == " --token-file 'a token' --tls-ca own.pem"
    assert one.of_clients("--model-") == " --model-token-file 'a token' --model-tls-ca own.pem"
    assert ServerSecurity(tls_from_ray=True).of_clients() == " --tls-from-ray"
    mutual = ServerSecurity(tls_cert=certificate, tls_client_ca=client_ca).of_clients()
    assert mutual.startswith(" --tls-ca own.pem --tls-cert CERTIFICATE --tls-key KEY  # ")
    assert "signed by ca.pem" in mutual


def test_hints_have_the_scheme_of_a_dialect_that_is_served_alone() -> None:
    assert client_scheme(None) == ""
    assert client_scheme(["rlmesh-wire-v1", "dm_env_rpc.v1"]) == ""
    assert client_scheme(["dm_env_rpc.v1"]) == "dm_env_rpc://"


def test_a_server_says_where_its_token_comes_from() -> None:
    assert EndpointSecurity().token_fact(None) == {}
    assert EndpointSecurity(token_file=Path("token")).token_fact("t") == {"token": "required"}
    assert EndpointSecurity().token_fact("t") == {"token": "required: that of RLMESH_RAY_TOKEN"}


def test_no_token_and_a_token_exclude_each_other() -> None:
    assert EndpointSecurity().required("t") == "t"
    assert EndpointSecurity().required(None) is None
    assert EndpointSecurity(no_token=True).required(None) is False
    with pytest.raises(ConfigurationError, match=r"but there is a token .*; leave out one of"):
        EndpointSecurity(no_token=True).required("t")


def test_how_to_record_goes_with_the_folder() -> None:
    assert RecordingFlags(Path("there"), 2.0, "none").options() == RecordOptions(
        Path("there"), 2.0, "none"
    )
    assert RecordingFlags().options() is None


@pytest.mark.parametrize(
    ("max_gb", "video", "every"), [(2.0, "auto", None), (10.0, "none", None), (10.0, "auto", 10)]
)
def test_how_to_record_is_refused_without_the_folder(
    max_gb: float, video: str, every: int | None
) -> None:
    with pytest.raises(ConfigurationError, match="add --record FOLDER"):
        RunnerRecordingFlags(None, max_gb, video, every).options()
