"""A server between a client and a real one that breaks one clause: what sabotage is made of.

Frames pass through as messages, so that each saboteur says in its few lines what it does to
one kind of message and leaves everything else alone.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, TracebackType
from typing import Any, Self

import grpc

from rlmesh_ray.protocol.handshake import HandshakeRequest, HandshakeResponse
from rlmesh_ray.protocol.messages import MalformedRequest
from rlmesh_ray.wire.rlmesh_v1 import env as env_wire
from rlmesh_ray.wire.rlmesh_v1 import model as model_wire
from rlmesh_ray.wire.rlmesh_v1.handshake import ShutdownResponse
from tests.loopback.ports import plain_channel

SERVICES: dict[str, tuple[str, ModuleType]] = {
    "env": ("rlmesh.env.v1.EnvService", env_wire),
    "model": ("rlmesh.model.v1.ModelService", model_wire),
}


class Abort(Exception):  # what a saboteur raises to break the call
    """End the call with a gRPC error."""


class Sabotage:
    """Leaves everything as it is; a saboteur overrides what it breaks.

    One instance is made for each call, so that attributes are those of one session; what has
    to last longer belongs to ``memory``.

    Args:
        memory: Shared by all calls to one tampering server.
    """

    def __init__(self, memory: dict[str, Any]) -> None:
        self.memory = memory
        self.num_outstanding = 0
        """Requests that have been passed on and not been answered."""

    def offer(self, offer: HandshakeRequest) -> HandshakeRequest:
        """Change what the client says first."""
        return offer

    def answer(self, offer: HandshakeRequest, answer: HandshakeResponse) -> HandshakeResponse:
        """Change what the server replies to ``offer``, which is the client's own."""
        return answer

    def answer_frame(self, frame: bytes) -> bytes:
        """Change the reply's bytes."""
        return frame

    def joined(self, metadata: dict[str, str]) -> None:
        """A stream was opened, with this of the client's own metadata."""

    def shutdown(self, response: ShutdownResponse) -> ShutdownResponse:
        """Change the answer to Shutdown."""
        return response

    def request(self, request: Any) -> Iterable[Any]:
        """Pass on something else than ``request``."""
        return [request]

    def early(self, request: Any) -> Iterable[Any]:
        """Answer before the server does."""
        return []

    def response(self, response: Any) -> Iterable[Any]:
        """Send something else than ``response``."""
        return [response]


class TamperingServer:
    """Serves what another address serves, through a saboteur. A context manager.

    Args:
        upstream: Address of the real server.
        service: ``"env"`` or ``"model"``.
        sabotage: What is done to each call.
    """

    def __init__(
        self, upstream: str, service: str, sabotage: Callable[[dict[str, Any]], Sabotage] = Sabotage
    ) -> None:
        self._service, self._wire = SERVICES[service]
        self.memory: dict[str, Any] = {}
        """What the saboteurs of all calls share."""
        self._new_sabotage = sabotage
        self._channel = plain_channel(upstream)
        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        handlers = {
            "Handshake": grpc.unary_unary_rpc_method_handler(self._handshake),
            "Join": grpc.stream_stream_rpc_method_handler(self._join),
            "Shutdown": grpc.unary_unary_rpc_method_handler(self._shutdown),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(self._service, handlers),)
        )
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()
        self._server.stop(None).wait(10.0)

    def _path(self, method: str) -> str:
        return f"/{self._service}/{method}"

    def _handshake(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        saboteur = self._new_sabotage(self.memory)
        call = self._channel.unary_unary(self._path("Handshake"))
        try:
            offer = self._wire.HANDSHAKE.parse_request(data)
            forged = self._wire.HANDSHAKE.pack_request(saboteur.offer(offer))
            answer = saboteur.answer(
                offer, self._wire.HANDSHAKE.parse_response(call(forged, timeout=10.0))
            )
            return saboteur.answer_frame(self._wire.HANDSHAKE.pack_response(answer))
        except Abort as abort:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(abort))
            raise

    def _shutdown(self, data: bytes, _context: grpc.ServicerContext) -> bytes:
        call = self._channel.unary_unary(self._path("Shutdown"))
        response = self._wire.HANDSHAKE.parse_shutdown_response(call(data, timeout=10.0))
        forged = self._new_sabotage(self.memory).shutdown(response)
        packed: bytes = self._wire.HANDSHAKE.pack_shutdown_response(
            accepted=forged.accepted, message=forged.message
        )
        return packed

    def _join(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        saboteur = self._new_sabotage(self.memory)
        own = _own(context.invocation_metadata())
        saboteur.joined(dict(own))
        onward: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        call = self._channel.stream_stream(self._path("Join"))(iter(onward.get, None), metadata=own)
        # Everything that goes to the client: frames, an Abort, or the end.
        outbox: queue.SimpleQueue[bytes | BaseException | None] = queue.SimpleQueue()
        lock = threading.Lock()
        pumps = [
            threading.Thread(
                target=self._pump_requests, args=(requests, saboteur, onward, outbox, lock)
            ),
            threading.Thread(target=self._pump_responses, args=(call, saboteur, outbox, lock)),
        ]
        for pump in pumps:
            pump.start()
        try:
            while (item := outbox.get()) is not None:
                if isinstance(item, BaseException):
                    context.abort(grpc.StatusCode.INTERNAL, str(item))
                else:
                    yield item
        finally:
            call.cancel()
            onward.put(None)

    def _pump_requests(
        self,
        requests: Iterator[bytes],
        saboteur: Sabotage,
        onward: "queue.SimpleQueue[bytes | None]",
        outbox: "queue.SimpleQueue[bytes | BaseException | None]",
        lock: threading.Lock,
    ) -> None:
        try:
            for frame in requests:
                request = self._wire.parse_request(frame)
                with lock:
                    for response in saboteur.early(request):
                        outbox.put(None if response is None else self._packed(response))
                    for changed in saboteur.request(request):
                        saboteur.num_outstanding += 1
                        is_raw = isinstance(changed, MalformedRequest)
                        onward.put(frame if is_raw else self._wire.pack_request(changed))
        except Abort as abort:
            outbox.put(abort)
        except grpc.RpcError:
            pass  # the client is gone
        finally:
            onward.put(None)

    def _pump_responses(
        self,
        call: Iterator[bytes],
        saboteur: Sabotage,
        outbox: "queue.SimpleQueue[bytes | BaseException | None]",
        lock: threading.Lock,
    ) -> None:
        try:
            for frame in call:
                with lock:
                    saboteur.num_outstanding -= 1
                    for response in saboteur.response(self._wire.parse_response(frame)):
                        outbox.put(self._packed(response))
        except (Abort, grpc.RpcError) as error:
            outbox.put(error)
        finally:
            outbox.put(None)

    def _packed(self, response: Any) -> bytes:
        options = {"tag_arrays": False} if self._wire is env_wire else {}
        packed: bytes = self._wire.pack_response(response, **options)
        return packed


def _own(metadata: Any) -> tuple[tuple[str, str], ...]:
    """Return what the client's own code has put there."""
    return tuple((key, value) for key, value in metadata if key.startswith("rlmesh"))
