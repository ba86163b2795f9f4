"""The health of a gateway, from health checks of all its endpoints.

A gateway serves while one of its endpoints does. The health of the endpoint behind one client's
connection would make the fleet look ill for one replica, which new clients do not reach.
"""

import asyncio
import logging
import time

from rlmesh_ray.errors import CodecError, ConfigurationError
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol.gateway_balancer import Target
from rlmesh_ray.server.gateway_calls import shown_to
from rlmesh_ray.server.gateway_upstreams import Credentials, Upstream, Upstreams, open_upstream
from rlmesh_ray.server.health import Health
from rlmesh_ray.wire import health_v1
from rlmesh_ray.wire.health_v1 import ServingStatus

_LOG = logging.getLogger(__name__)

PERIOD_S = 2.0
"""How often each endpoint is asked."""
_TIMEOUT_S = 2.0


class GatewayHealth:
    """Checks all endpoints periodically; new connections avoid those that do not serve.

    To be used in the serving loop only, but for ``health``.

    Args:
        upstreams: Knows the endpoints.
        credentials: See ``Credentials``.
    """

    def __init__(self, upstreams: Upstreams, credentials: Credentials | None) -> None:
        self._upstreams = upstreams
        self._credentials = credentials
        self._own: dict[Target, Upstream] = {}
        self._health = Health(False, "its endpoints have not been asked yet")

    def health(self) -> Health:
        """Return whether an endpoint would serve a new client, as of the last check."""
        return self._health

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                await self.look()
            except Exception as error:  # noqa: BLE001  # no thread, say; the next check may succeed
                _LOG.exception("the endpoints behind the gateway cannot be asked")
                self._health = Health(False, f"its endpoints cannot be asked: {error}")

    async def look(self) -> None:
        """Check all endpoints once, and close connections that are not needed any more."""
        await self._upstreams.renew(at_once=True)
        await self._upstreams.close_idle()
        targets = self._upstreams.routes.targets
        for gone in set(self._own) - set(targets):
            await self._own.pop(gone).channel.close()
        reasons = await asyncio.gather(*(self._obstacle(target) for target in targets))
        for target, reason in zip(targets, reasons, strict=True):
            if reason:
                self._upstreams.routes.fail(target, time.monotonic())
        self._health = _together(reasons)

    async def close(self) -> None:
        """Close the connections to the endpoints."""
        own, self._own = self._own, {}
        for upstream in own.values():
            await upstream.channel.close()

    async def _obstacle(self, target: Target) -> str:
        """Check one endpoint; return why it does not serve, empty if it does."""
        request, metadata = health_v1.pack_request(), shown_to(target, ())
        try:
            if target not in self._own:
                self._own[target] = open_upstream(target, self._credentials)
            ask = self._own[target].channel.unary_unary(health_v1.CHECK)
            answer = await ask(request, timeout=_TIMEOUT_S, metadata=metadata)
            status = health_v1.parse_response(answer)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return ""  # it has no health service, but it answers
            return f"{error.code().name}: {error.details()}"
        except (CodecError, ConfigurationError) as error:
            return str(error)
        return "it says so" if status is ServingStatus.NOT_SERVING else ""


def _together(reasons: list[str]) -> Health:
    if not reasons:
        return Health(False, "there is no endpoint behind this gateway now")
    if all(reasons):
        return Health(
            False, f"none of the {len(reasons)} endpoints behind this gateway serves ({reasons[0]})"
        )
    return Health(True)
