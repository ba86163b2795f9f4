"""The gRPC service for observers of an endpoint and its sessions (ObserverService).

Rule 1: a list of sessions asks no worker; it reads their counters.
Rule 2: a picture is not one of the session's requests, and has no deadline once it has begun. It
delays the session, so there is one at a time, and a limited number a second.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from rlmesh_ray.errors import CodecError
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol.env_session import RenderOutcome
from rlmesh_ray.protocol.failure_effects import Failure
from rlmesh_ray.server.env_session_handler import EnvSessionHandler
from rlmesh_ray.server.error_text import parsed
from rlmesh_ray.server.log_context import current, short_name
from rlmesh_ray.server.session_scheduler import SessionScheduler
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire import observe_v1 as wire
from rlmesh_ray.wire.observe_v1 import EndpointStatistics, ObservedSession

MAX_A_SECOND = 10
"""Pictures of a session, lists and statistics of an endpoint; as many at once after a pause."""
MOST_SHARE = 0.1
"""Largest part of a session's time that pictures for observers may take."""


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
        """Return whether an event is allowed now, and count it."""
        now_s = self._clock()
        grown = (now_s - self._refilled_s) * self._rate
        self._tokens, self._refilled_s = min(self._rate, self._tokens + grown), now_s
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


@dataclass(frozen=True, slots=True)
class _ObserverRefusal:
    """The status of a refused call."""

    code: grpc.StatusCode
    message: str


class _Observed:
    """An open session, as observers see it."""

    def __init__(
        self,
        peer: str,
        dialect: str,
        handler: EnvSessionHandler,
        turns: SessionScheduler,
        renders: TokenBucket,
        clock: Callable[[], float],
    ) -> None:
        self._peer, self._dialect = peer, dialect
        self._handler = handler
        self._turns = turns
        self._renders = renders
        self._clock = clock
        self._not_before_s = 0.0
        self._since_ns = time.time_ns()

    def report(self, name: str) -> ObservedSession:
        """Return the state and the counters of the session."""
        executor = self._handler.executor
        counts, done = executor.episode_counts, executor.counts.read()
        episodes = zip(self._handler.episodes, counts.is_tracked, strict=True)
        return ObservedSession(
            name,
            self._peer,
            self._since_ns,
            self._dialect,
            executor.counts.transport,
            tuple(each.episode_id if each and is_tracked else "" for each, is_tracked in episodes),
            tuple(counts.step_counts.tolist()),
            tuple(counts.cumulative_rewards.tolist()),
            done.num_steps,
            done.lane_steps,
            executor.counts.resets,
            done.episodes,
            done.deviations,
        )

    async def draw(self, lane: int) -> bytes | _ObserverRefusal:
        """Return a picture of a lane, when its turn has come."""
        if self._turns.is_observed:
            return _exhausted(
                "a picture of this session is being rendered, or waits for its turn; ask again "
                "after it"
            )
        if self._clock() < self._not_before_s:
            return _exhausted(
                f"pictures take a session {MOST_SHARE:.0%} of its time at most; ask less often"
            )
        if not self._renders.take():
            return _exhausted(
                f"a session gives {MAX_A_SECOND} pictures a second, since each of them delays it; "
                "ask less often"
            )
        outcome = await self._turns.observe(partial(self._handler.executor.observe, lane))
        if outcome is None:
            return _gone()
        if isinstance(outcome, RenderOutcome):
            self._not_before_s = self._clock() + (1 / MOST_SHARE - 1) * outcome.took_s
        if isinstance(outcome, Failure):
            return _unable(f"the session has no picture to give: {outcome.message}")
        if outcome.png is None:
            return _unable(
                f"the environment has rendered nothing of lane {lane}; ask again when the lane has "
                "been reset"
            )
        return outcome.png


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
        """Return the handlers for a gRPC server."""
        calls = {"Statistics": grpc.unary_unary_rpc_method_handler(self.statistics)}
        return grpc.method_handlers_generic_handler(wire.SERVICE, calls)

    async def statistics(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Return the statistics."""
        del data  # the request is empty
        if not self._allowed.take():
            message = f"statistics may be asked for {MAX_A_SECOND} times a second; ask less often"
            await _refuse(context, _exhausted(message))
        return wire.pack_statistics(self._read())


class ObserverService:
    """Answers the calls of ObserverService about the sessions of one EnvService.

    For the serving loop.

    Args:
        contract: The contract of the endpoint.
        clock: Returns seconds that only grow.
    """

    def __init__(self, contract: EnvContract, clock: Callable[[], float] = time.monotonic) -> None:
        self._contract = contract
        self._clock = clock
        self._open: dict[str, _Observed] = {}
        self._lists = TokenBucket(MAX_A_SECOND, clock)

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the handlers for a gRPC server."""
        calls = {
            "List": grpc.unary_unary_rpc_method_handler(self.list),
            "Render": grpc.unary_unary_rpc_method_handler(self.render),
        }
        return grpc.method_handlers_generic_handler(wire.SERVICE, calls)

    def open(
        self, peer: str, dialect: str, handler: EnvSessionHandler, turns: SessionScheduler
    ) -> Callable[[], None]:
        """Make a session observable; return the function that ends that, which is idempotent.

        Args:
            peer: gRPC's name of its client.
            dialect: Name of the client's dialect.
            handler: Handler of the session.
            turns: Scheduler of the session.
        """
        _, name = current()
        while not name or name in self._open:  # a replay has the same
            name = short_name("")
        renders = TokenBucket(MAX_A_SECOND, self._clock)
        self._open[name] = _Observed(peer, dialect, handler, turns, renders, self._clock)

        def close() -> None:
            self._open.pop(name, None)

        return close

    async def list(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Return the open sessions, with their counters."""
        del data  # the request is empty
        if not self._lists.take():
            await _refuse(
                context,
                _exhausted(
                    f"{MAX_A_SECOND} lists of sessions a second are allowed here; ask less often"
                ),
            )
        return wire.pack_sessions(session.report(name) for name, session in self._open.items())

    async def render(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Return a picture of a session's lane."""
        request = parsed(wire.parse_render_request, data)
        del data
        if isinstance(request, CodecError):
            refusal = _ObserverRefusal(grpc.StatusCode.INVALID_ARGUMENT, str(request))
            await _refuse(context, refusal)
            raise AssertionError("abort raises")
        picture = await self._render(*request)
        if isinstance(picture, _ObserverRefusal):
            await _refuse(context, picture)
            raise AssertionError("abort raises")
        return wire.pack_png(picture)

    async def _render(self, name: str, lane: int) -> bytes | _ObserverRefusal:
        session, contract = self._open.get(name), self._contract
        if session is None:
            return _gone()
        if lane >= contract.num_envs:
            message = f"lane {lane} is not in [0, {contract.num_envs})"
            return _ObserverRefusal(grpc.StatusCode.INVALID_ARGUMENT, message)
        if contract.render_mode != "rgb_array":
            return _unable(
                f"the environment has render mode {contract.render_mode or 'none'}, which gives no "
                "pictures; serve it with render_mode='rgb_array' "
                '(--env-kwargs \'{"render_mode": "rgb_array"}\')'
            )
        return await session.draw(lane)


def _gone() -> _ObserverRefusal:
    message = "no such session is open (any more); list them again"
    return _ObserverRefusal(grpc.StatusCode.NOT_FOUND, message)


def _unable(message: str) -> _ObserverRefusal:
    return _ObserverRefusal(grpc.StatusCode.FAILED_PRECONDITION, message)


def _exhausted(message: str) -> _ObserverRefusal:
    return _ObserverRefusal(grpc.StatusCode.RESOURCE_EXHAUSTED, message)


async def _refuse(context: grpc.aio.ServicerContext, refusal: _ObserverRefusal) -> None:
    await context.abort(refusal.code, refusal.message)
