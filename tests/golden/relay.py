"""A gRPC server that hands every message on to another one, and keeps a copy."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from tests.golden.corpus import Frame

_SERVICES = {"rlmesh.env.v1.EnvService": "env", "rlmesh.model.v1.ModelService": "model"}


class Relay(grpc.GenericRpcHandler):
    """Answers whatever is asked with what ``target`` answers. Only for recording: it is slow."""

    def __init__(self, target: str) -> None:
        # A server on a unix socket refuses the authority that gRPC would make of the path.
        options = [("grpc.default_authority", "localhost")]
        self._channel = grpc.insecure_channel(target, options=options)
        self._lock = threading.Lock()
        self._frames: list[Frame] = []

    @property
    def frames(self) -> list[Frame]:
        """Everything that has gone through, in order."""
        with self._lock:
            return list(self._frames)

    def service(self, details: Any) -> grpc.RpcMethodHandler | None:
        """Handle any method of the two services."""
        service, _, method = details.method.removeprefix("/").partition("/")
        if service not in _SERVICES:
            return None
        call = f"{_SERVICES[service]}/{method}"
        if method == "Join":
            return grpc.stream_stream_rpc_method_handler(self._joined(details.method, call))
        return grpc.unary_unary_rpc_method_handler(self._asked(details.method, call))

    def _joined(self, path: str, call: str) -> Any:
        def join(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            # Peers wait for it before they send anything.
            context.send_initial_metadata(())
            requests = (self._kept(call, ">", data) for data in requests)
            answers = self._channel.stream_stream(path)(requests)
            context.add_callback(answers.cancel)
            try:
                for data in answers:
                    yield self._kept(call, "<", data)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.CANCELLED:
                    context.abort(error.code(), error.details() or "")

        return join

    def _asked(self, path: str, call: str) -> Any:
        def ask(data: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                answer = self._channel.unary_unary(path)(data)
            except grpc.RpcError as error:
                context.abort(error.code(), error.details() or "")
                raise
            # What was not understood, such as a handshake of another generation, is not kept.
            self._kept(call, ">", data)
            return self._kept(call, "<", answer)

        return ask

    def _kept(self, call: str, way: str, data: bytes) -> bytes:
        with self._lock:
            self._frames.append(Frame(call, way, data))
        return data


@contextmanager
def relayed(target: str) -> Iterator[tuple[str, Relay]]:
    """Run a relay to ``target``; yield its address and itself."""
    relay = Relay(target)
    server = grpc.server(ThreadPoolExecutor(16))
    server.add_generic_rpc_handlers((relay,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", relay
    finally:
        server.stop(None)
