"""What Ray keeps for itself on a node."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rlmesh_ray.auth.ray_credentials import RayTls, ray_tokens, require_ray_tls
from rlmesh_ray.errors import ConfigurationError
from tests.odd_files import IRREGULAR, put

FILES = {
    "RAY_TLS_SERVER_CERT": "/tls/own.pem",
    "RAY_TLS_SERVER_KEY": "/tls/own.key",
    "RAY_TLS_CA_CERT": "/tls/ca.pem",
}


@pytest.fixture(autouse=True)
def ray_names_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, file in FILES.items():
        monkeypatch.setenv(name, file)


@pytest.mark.parametrize("switch", ["1", "true", "True"])
def test_rays_files_are_taken_where_ray_uses_tls(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_USE_TLS", switch)
    files = RayTls().files()

    assert files is not None
    assert files == require_ray_tls()
    assert [str(file) for file in files] == ["/tls/own.pem", "/tls/own.key", "/tls/ca.pem"]


@pytest.mark.parametrize("switch", ["", "0"])
def test_where_ray_uses_no_tls_there_are_no_files(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    if switch:
        monkeypatch.setenv("RAY_USE_TLS", switch)
    assert RayTls().files() is None
    with pytest.raises(ConfigurationError, match="RAY_USE_TLS=1"):
        require_ray_tls()


@pytest.mark.parametrize("name", FILES)
def test_a_variable_that_is_missing_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv(name, "")

    with pytest.raises(ConfigurationError, match=f"RAY_USE_TLS is set, but not {name}"):
        RayTls().files()


def test_rays_tokens_are_found_wherever_ray_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("at-home\n")
    (tmp_path / "named").write_text("named\n")
    environ = {"RAY_AUTH_TOKEN": "variable", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "named")}

    assert ray_tokens(environ) == ("variable", "named", "at-home")
    assert ray_tokens({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "nowhere")}) == ("at-home",)


@pytest.mark.parametrize("make", IRREGULAR.values(), ids=IRREGULAR)
def test_what_is_no_file_holds_no_token_of_rays(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)

    assert ray_tokens({"RAY_AUTH_TOKEN_PATH": str(put(make, tmp_path / "token"))}) == ()
