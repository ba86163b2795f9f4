"""Other programs that may answer at an address, each recognized by the errors of gRPC."""

import http.server
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from rlmesh_ray import ModelServer
from rlmesh_ray.auth.client_tls import ClientTls
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.model.remote_model import shake_hands
from rlmesh_ray.errors import (
    AccessDeniedError,
    CapacityError,
    EndpointError,
    EndpointUnreachableError,
)
from rlmesh_ray.server.endpoint.bind_policy import ServerTls

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="makes its certificates with openssl"
)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ServerTls]:
    """Return a certificate for this host, one of another authority, one of another host."""
    folder = tmp_path_factory.mktemp("certificates")
    names = {"own": "IP:127.0.0.1", "other": "IP:127.0.0.1", "elsewhere": "DNS:elsewhere"}
    made = {}
    for name, subject in names.items():
        made[name] = ServerTls(folder / f"{name}.pem", folder / f"{name}.key")
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
             "-subj", f"/CN={name}", "-addext", f"subjectAltName={subject}",
             "-keyout", f"{name}.key", "-out", f"{name}.pem"],
            cwd=folder, check=True, capture_output=True, timeout=30,
        )  # fmt: skip
    return made


def authority(certificate: ServerTls) -> ClientTls:
    return ClientTls(root_ca=certificate.certificate)


class Quiet(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_arguments: Any) -> None:
        pass


@pytest.fixture
def web_server() -> Iterator[str]:
    server = http.server.HTTPServer(("127.0.0.1", 0), Quiet)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(10.0)
    server.server_close()


def test_a_web_server_does_not_speak_grpc(web_server: str) -> None:
    with pytest.raises(EndpointUnreachableError, match="does not use gRPC"):
        shake_hands(ConnectOptions(web_server))


@needs_openssl
def test_an_endpoint_without_tls_does_not_speak_it(certificates: dict[str, ServerTls]) -> None:
    with (
        ModelServer(len) as server,
        pytest.raises(EndpointUnreachableError, match="does not use TLS"),
    ):
        shake_hands(ConnectOptions(server.address, tls=authority(certificates["own"])))


@needs_openssl
@pytest.mark.parametrize(
    ("served", "trusted", "message"),
    [
        ("own", None, "if the endpoint uses TLS"),
        ("own", "other", "not signed by the authority"),
        ("elsewhere", "elsewhere", "for another host name"),
    ],
)
def test_an_endpoint_with_tls_names_what_is_missing(
    served: str, trusted: str | None, message: str, certificates: dict[str, ServerTls]
) -> None:
    tls = authority(certificates[trusted]) if trusted else None
    with (
        ModelServer(len, tls=certificates[served]) as server,
        pytest.raises(EndpointUnreachableError, match=message),
    ):
        shake_hands(ConnectOptions(server.address, tls=tls))


@needs_openssl
def test_the_right_authority_is_enough(certificates: dict[str, ServerTls]) -> None:
    with ModelServer(len, tls=certificates["own"]) as server:
        assert shake_hands(
            ConnectOptions(server.address, tls=authority(certificates["own"]))
        ).compatible


class Answers(grpc.GenericRpcHandler):
    """Answers every unary call with a megabyte, or with the status that its path names."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        status = details.method.rsplit("/", 1)[1]

        def answer(_data: bytes, context: grpc.ServicerContext) -> bytes:
            if status != "Large":
                context.abort(grpc.StatusCode[status], "because")
            return bytes(1_000_000)

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def connect_options() -> Iterator[ConnectOptions]:
    server = grpc.server(
        ThreadPoolExecutor(2), options=[("grpc.max_receive_message_length", 500_000)]
    )
    server.add_generic_rpc_handlers((Answers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield ConnectOptions(f"127.0.0.1:{port}")
    server.stop(None).wait(10.0)


@pytest.mark.parametrize("size", [1, 600_000], ids=["response", "request"])
def test_a_message_that_is_too_large_is_no_full_endpoint(
    connect_options: ConnectOptions, size: int
) -> None:
    channel = connect_options.open(max_receive_bytes=500_000)
    try:
        with pytest.raises(EndpointError, match="size limit") as caught:
            connect_options.call(channel, "/any/Large", bytes(size))
    finally:
        channel.close()

    assert type(caught.value) is EndpointError
    assert "500000" in str(caught.value)


@pytest.mark.parametrize(
    ("status", "error"),
    [("RESOURCE_EXHAUSTED", CapacityError), ("PERMISSION_DENIED", AccessDeniedError)],
)
def test_a_status_says_why_no_session_is_admitted(
    connect_options: ConnectOptions, status: str, error: type[EndpointError]
) -> None:
    channel = connect_options.open()
    try:
        with pytest.raises(error, match="because"):
            connect_options.call(channel, f"/any/{status}", b"")
    finally:
        channel.close()
