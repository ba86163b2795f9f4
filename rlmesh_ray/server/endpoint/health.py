"""grpc.health.v1 on an endpoint's port: probed at each request, so that it cannot go stale.

Like every call it needs the endpoint's token. Probes that cannot send one, such as Kubernetes'
``grpc`` kind, run ``rlmesh-ray inspect --health`` beside the endpoint instead (kind ``exec``).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass

from rlmesh_ray.errors import CodecError
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol.handshake import quoted
from rlmesh_ray.server.endpoint.calls import parsed, refuse, text_of
from rlmesh_ray.wire import health_v1 as wire

WATCH_PERIOD_S = 1.0
"""How often a Watch calls the probe."""

# All metadata of a call together must stay below 8 KiB, or the call fails.
_MAX_REASON_BYTES = 2000


@dataclass(frozen=True, slots=True)
class Health:
    """Whether an endpoint can serve a new client, now."""

    is_serving: bool
    reason: str = ""
    """Why not; empty while it serves."""


Probe = Callable[[], Health]
"""Returns the health of an endpoint's resources. Called in any thread, the serving loop too: it
must not block."""


def run_probe(probe: Probe) -> Health:
    try:
        return probe()
    except Exception as error:  # noqa: BLE001  # a health check always gets an answer
        return Health(False, f"the health probe raised {type(error).__name__}: {text_of(error)}")


class HealthService:
    """Answers Check and Watch, for an endpoint and for each of its services. For the serving loop.

    ``services`` are full names; the empty name stands for the endpoint. One probe is for them all.
    """

    def __init__(self, probe: Probe, services: Collection[str]) -> None:
        self._probe = probe
        self._services = frozenset((wire.WHOLE_ENDPOINT, *services))
        self._news = asyncio.Event()
        self._is_over = False

    def handlers(self) -> grpc.ServiceRpcHandler:
        return grpc.method_handlers_generic_handler(
            wire.SERVICE,
            {
                "Check": grpc.unary_unary_rpc_method_handler(self.check),
                "Watch": grpc.unary_stream_rpc_method_handler(self.watch),
            },
        )

    def refresh(self) -> None:
        """Have every Watch call the probe now: the health may have changed."""
        self._news.set()
        self._news = asyncio.Event()

    def end(self) -> None:
        """Have every Watch send the health once more, if it has changed, and end."""
        self._is_over = True
        self.refresh()

    async def check(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Answer with the health now; the reason stands in the trailing metadata."""
        service = parsed(_service_in, data)
        del data
        if isinstance(service, CodecError):
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(service))
        if service not in self._services:
            await refuse(context, grpc.StatusCode.NOT_FOUND, f"no service {service!r} here")
        health = run_probe(self._probe)
        if health.reason:
            reason = health.reason.encode(errors="replace")[:_MAX_REASON_BYTES]
            context.set_trailing_metadata(((wire.REASON_METADATA_KEY, reason),))
        return wire.pack_response(_status(health))

    async def watch(self, data: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """Send the health now, and again whenever it has changed, until the endpoint stops."""
        service = parsed(_service_in, data)
        del data
        if isinstance(service, CodecError):
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(service))
        is_known = service in self._services
        sent: int | None = None
        while True:
            # What is read first cannot be missed while a response is on its way.
            news, is_last = self._news, self._is_over
            status = _status(run_probe(self._probe)) if is_known else wire.SERVICE_UNKNOWN
            if status != sent:
                yield wire.pack_response(status)
                sent = status
            if is_last:
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), WATCH_PERIOD_S)


def _service_in(data: bytes) -> str:
    return quoted(wire.parse_request(data))


def _status(health: Health) -> int:
    return wire.SERVING if health.is_serving else wire.NOT_SERVING
