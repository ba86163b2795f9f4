"""Connection options of clients."""

from pathlib import Path

import pytest

from rlmesh_ray import ClientTls, TokenFile
from rlmesh_ray.cli.error_reporting import exit_code
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.errors import ConfigurationError, EndpointUnreachableError


def test_a_missing_token_file_is_a_wrong_option(tmp_path: Path) -> None:
    connect_options = ConnectOptions("127.0.0.1:1", TokenFile(tmp_path / "none"))

    with pytest.raises(ConfigurationError, match=r"/none: No such file") as caught:
        _ = connect_options.metadata

    assert exit_code(caught.value) == 2


def test_a_token_file_that_is_unusable_just_now_may_be_usable_later(tmp_path: Path) -> None:
    (tmp_path / "token").touch(mode=0o600)

    with pytest.raises(EndpointUnreachableError, match="no token to send"):
        _ = ConnectOptions("127.0.0.1:1", TokenFile(tmp_path / "token")).metadata


def test_a_missing_authority_is_a_wrong_option(tmp_path: Path) -> None:
    connect_options = ConnectOptions("127.0.0.1:1", tls=ClientTls(tmp_path / "none.pem"))

    with pytest.raises(ConfigurationError, match=r"/none\.pem .*No such file") as caught:
        connect_options.open()

    assert exit_code(caught.value) == 2


def test_a_token_file_that_was_read_before_may_come_back(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text("secret\n")
    connect_options = ConnectOptions("127.0.0.1:1", TokenFile(path))
    _ = connect_options.metadata

    path.unlink()

    with pytest.raises(EndpointUnreachableError, match="no token to send"):
        _ = connect_options.metadata
