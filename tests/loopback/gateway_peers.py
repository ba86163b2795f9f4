"""Endpoints behind a gateway that are made of nothing but bytes, and note what reaches them."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from rlmesh_ray.protocol.gateway_balancer import Target
from rlmesh_ray.server.endpoint.endpoint import Endpoint
from tests.loopback.eventually import eventually

SERVICE = "toy.v1.Toy"
MEBIBYTE = 1 << 20


class Listing:
    """Lists endpoints for a gateway, which asks when it looks after them.

    Args:
        targets: The endpoints; the test may change ``targets``.
    """

    def __init__(self, *targets: Target) -> None:
        self.targets = list(targets)
        self._num_asked = 0

    def __call__(self) -> list[Target]:
        self._num_asked += 1
        return list(self.targets)

    def await_looks(self, count: int = 1) -> None:
        """Wait until the gateway has begun and ended so many looks at its endpoints."""
        enough = self._num_asked + count + 1
        assert eventually(lambda: self._num_asked >= enough)


@dataclass(eq=False)
class Seen:
    """One call, as the endpoint has seen it."""

    method: str
    peer: str
    metadata: tuple[tuple[str, str | bytes], ...]
    time_remaining_s: float | None
    messages: list[bytes] = field(default_factory=list)
    num_written: int = 0
    ended: threading.Event = field(default_factory=threading.Event)


class Toy(grpc.ServiceRpcHandler):
    """An endpoint; what a call's name says happens to it, else its messages come back."""

    def __init__(self, name: str, token: str | None = None) -> None:
        self.name = name
        self.seen: list[Seen] = []
        self._token = token
        self._endpoint = Endpoint("127.0.0.1:0", token=token, on_stop=lambda: None)
        self._endpoint.start([self], max_receive_bytes=64 * MEBIBYTE)

    @property
    def target(self) -> Target:
        return Target(self.name, 1, self._endpoint.address, self._token)

    def stop(self) -> None:
        self._endpoint.stop(0.0)

    def service_name(self) -> str:
        return SERVICE

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if not details.method.startswith(f"/{SERVICE}/"):
            return None

        async def handle(requests: AsyncIterator[bytes], context: Any) -> None:
            await self._handle(details.method.rpartition("/")[2], requests, context)

        return grpc.stream_stream_rpc_method_handler(handle)

    async def _handle(self, name: str, requests: AsyncIterator[bytes], context: Any) -> None:
        seen = Seen(
            name,
            context.peer(),
            tuple(context.invocation_metadata()),
            context.time_remaining(),
        )
        self.seen.append(seen)
        context.add_done_callback(lambda _: seen.ended.set())
        if name == "HeadersFirst":
            await context.send_initial_metadata((("said", "early"), ("bits-bin", b"\0\xff")))
        if name == "Refuse":
            trailing = (("why", "mood"), ("bits-bin", b"\xff\0"))
            await context.abort(grpc.StatusCode.DATA_LOSS, "no mood for it: ä", trailing)
        if name == "Turn":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "draining: dial another")
        if name == "Hang":
            await asyncio.Event().wait()
        if name == "Flood":
            while True:
                await context.write(bytes(MEBIBYTE))
                seen.num_written += 1
        async for message in requests:
            seen.messages.append(message)
            await context.write(message)
        await context.write(self.name.encode())
        context.set_trailing_metadata((("said", "late"),))
