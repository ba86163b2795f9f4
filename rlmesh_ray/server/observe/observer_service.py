"""The call Statistics of ObserverService, and the rate limit of observers.

The service's other calls, about the sessions of an environment, stand in ``env_service``.
"""

import time
from collections.abc import Callable, Iterable

from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.server.endpoint.error_text import refuse
from rlmesh_ray.wire import observe_v1 as wire
from rlmesh_ray.wire.observe_v1 import EndpointStatistics

MAX_A_SECOND = 10
"""Pictures of a session, lists and statistics of an endpoint; as many at once after a pause."""


class TokenBucket:
    """A rate limit.

    Args:
        rate: Events a second; as many at once after a pause.
        clock: Returns seconds that only grow.
    """

    def __init__(self, rate: int, clock: Callable[[], float]) -> None:
        self._rate = self._tokens = float(rate)
        self._clock = clock
        self._refilled_s = clock()

    def take(self) -> bool:
        now_s = self._clock()
        grown = (now_s - self._refilled_s) * self._rate
        self._tokens, self._refilled_s = min(self._rate, self._tokens + grown), now_s
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class StatisticsService:
    """Answers the call Statistics of ObserverService. For the serving loop.

    Args:
        read: Returns the statistics; it must not block.
        clock: Returns seconds that only grow.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[EndpointStatistics]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._allowed = TokenBucket(MAX_A_SECOND, clock)

    def handlers(self) -> grpc.GenericRpcHandler:
        calls = {"Statistics": grpc.unary_unary_rpc_method_handler(self.statistics)}
        return grpc.method_handlers_generic_handler(wire.SERVICE, calls)

    async def statistics(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        del data  # the request is empty
        if not self._allowed.take():
            message = f"statistics may be asked for {MAX_A_SECOND} times a second; ask less often"
            await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        return wire.pack_statistics(self._read())
