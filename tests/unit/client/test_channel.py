"""Connection options of clients."""

from pathlib import Path

import grpc
import pytest

from rlmesh_ray import ClientTls, TokenFile
from rlmesh_ray.cli.error_reporting import exit_code
from rlmesh_ray.client.channel import ConnectOptions, translate_grpc_error
from rlmesh_ray.errors import (
    ConfigurationError,
    EndpointClosedError,
    EndpointError,
    EndpointLostError,
    EndpointTimeoutError,
    EndpointUnreachableError,
)


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


class FailedCall(grpc.RpcError, grpc.Call):
    """A call that has ended with a status."""

    __abstractmethods__: frozenset[str] = frozenset()

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self.code = lambda: code
        self.details = lambda: details


@pytest.mark.parametrize(
    ("code", "details", "error"),
    [
        (
            grpc.StatusCode.CANCELLED,
            "Locally cancelled by application!",
            EndpointClosedError("this side has closed the connection", "host:1"),
        ),
        (
            grpc.StatusCode.CANCELLED,
            "Stream removed (Channel closed!)",
            EndpointClosedError("this side has closed the connection", "host:1"),
        ),
        (
            grpc.StatusCode.CANCELLED,
            "CANCELLED",
            EndpointLostError("the endpoint, or a proxy before it, has ended the call", "host:1"),
        ),
        (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "Deadline Exceeded",
            EndpointTimeoutError("no answer in time", "host:1"),
        ),
        (
            grpc.StatusCode.UNKNOWN,
            "Unexpected <class 'OSError'>: [Errno 24] Too many open files",
            EndpointLostError(
                "the endpoint has failed (OSError: [Errno 24] Too many open files); its log says "
                "more",
                "host:1",
            ),
        ),
    ],
)
def test_grpcs_own_words_reach_no_user(
    code: grpc.StatusCode, details: str, error: EndpointError
) -> None:
    translated = translate_grpc_error(FailedCall(code, details), "host:1", is_open=True)

    assert (type(translated), str(translated)) == (type(error), str(error))
