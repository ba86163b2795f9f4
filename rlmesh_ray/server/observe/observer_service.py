"""The limits of observers, and the call Statistics of ObserverService.

The service's other calls, about the sessions of an environment, stand in ``env_service``.
"""

import time
from collections.abc import Callable, Iterable

from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.server.endpoint.calls import refuse
from rlmesh_ray.wire import observe_v1 as wire
from rlmesh_ray.wire.observe_v1 import EndpointStatistics

MAX_A_SECOND = 10
"""Pictures of a session, lists and statistics of an endpoint; as many at once after a pause."""
MOST_SHARE = 0.1
"""Largest part of a session's time that pictures for observers may take."""


class TokenBucket:
    """A rate limit: at most ``rate`` events a second, and as many together after a pause."""

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


class PictureLimits:
    """The limits of one session's pictures, each of which delays the session.

    One is drawn at a time, at most ``MAX_A_SECOND`` in a second, and together they take at most
    ``MOST_SHARE`` of the session's time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._bucket = TokenBucket(MAX_A_SECOND, clock)
        self._none_before_s = 0.0

    def objection(self, *, is_rendering: bool) -> str:
        """Return why a picture is refused now; empty: it is allowed, and counted."""
        if is_rendering:
            return (
                "a picture of this session is being rendered, or waits for its turn; ask again "
                "after it"
            )
        if self._clock() < self._none_before_s:
            return f"pictures take a session {MOST_SHARE:.0%} of its time at most; ask less often"
        if not self._bucket.take():
            return (
                f"a session gives {MAX_A_SECOND} pictures a second, since each of them delays it; "
                "ask less often"
            )
        return ""

    def note(self, took_s: float) -> None:
        self._none_before_s = self._clock() + (1 / MOST_SHARE - 1) * took_s


class StatisticsService:
    """Answers the call Statistics of ObserverService. For the serving loop."""

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
