"""The policy of a model endpoint: its routes, its weights, and its predictions in batches.

Requests arrive and are answered in the serving loop. A batch runs in the policy's thread, or in the
loop while the policy is fast (see ``LatencyGate``).
"""

import asyncio
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import CancelledError

from rlmesh_ray import __version__
from rlmesh_ray.errors import (
    ConfigurationError,
    EndpointClosedError,
    EndpointTimeoutError,
    RlmeshError,
)
from rlmesh_ray.histogram import (
    BATCH_BOUNDS_ROWS,
    DURATION_BOUNDS_NS,
    NS_PER_S,
    HistogramCounter,
    histogram_of,
)
from rlmesh_ray.models.policy import Policy, UpdatablePolicy, traits_of
from rlmesh_ray.models.torch.threads import limit_torch_threads
from rlmesh_ray.models.wrappers import KeptChunks
from rlmesh_ray.options import FIRST, KEPT, require_seconds
from rlmesh_ray.protocol.messages import BatchRun
from rlmesh_ray.server.endpoint.health import Health
from rlmesh_ray.server.model.model_options import (
    DEFAULT_STUCK_AFTER_S,
    checked_version,
    version_after,
)
from rlmesh_ray.server.model.policy_thread import PolicyThread
from rlmesh_ray.server.model.prediction_batch import Actions, PredictionRequest, run_batch
from rlmesh_ray.server.observe.counters import SessionCounters
from rlmesh_ray.server.observe.statistics import ModelStatistics
from rlmesh_ray.spaces.contract import EnvContract, space_lines
from rlmesh_ray.spaces.images import image_leaves
from rlmesh_ray.wire.policy_v1 import PolicyFacts

_FULL_ROUND = 8
"""Predictions that run without waiting for more. To wait for more brought 32 routes nothing on two
cores, and the slowest hundredth of their answers took 3.7 times as long as at a server that does
nothing, and 1.4 to 2.3 times with this (``benchmarks serving --only latency``)."""

_MAX_ACCEPTED = 64
"""Kinds of environments that a batcher remembers the policy to accept."""

_FAST_S = 0.002
_SLOW_S = 0.1
_MEAN_WEIGHT = 0.05
_NUM_TO_PROVE = 100
_NUM_TO_PROVE_AGAIN = 1000


class LatencyGate:
    """Decides from the latency of batches whether the serving loop may run the policy itself.

    In a thread, a policy may hang without blocking the endpoint. For a small network the thread
    costs several times what the network takes: two threads that compute by turns pass the
    interpreter's lock at each operation of torch, and the caches begin cold.

    Args:
        only_computes: Whether the policy waits for nothing: no files, no locks, no other device.
    """

    def __init__(self, *, only_computes: bool) -> None:
        self._only_computes = only_computes
        self._num_to_prove = _NUM_TO_PROVE
        self._mean_s = 0.0
        self.is_fast = only_computes and not _NUM_TO_PROVE
        """Whether the policy only computes, and batches take 2 ms at most in the running mean.

        A mean, since on a busy machine any batch may be interrupted for some milliseconds."""

    def note(self, took_s: float) -> None:
        """Record a batch's latency. After one above 0.1 s, a thousand must prove it again."""
        self._mean_s += _MEAN_WEIGHT * (took_s - self._mean_s)
        if took_s > _SLOW_S:
            self._num_to_prove = _NUM_TO_PROVE_AGAIN
        elif self._num_to_prove:
            self._num_to_prove -= 1
        is_proved = self._only_computes and not self._num_to_prove
        self.is_fast = is_proved and self._mean_s <= _FAST_S


class BatchQueue:
    """Queues requests while the policy is busy, and hands them out in batches when it is free.

    Rule 1: it is work-conserving: whenever the policy is free and a request waits, a batch is
    handed out. Requests that arrive while it is busy run in the next one. Only with a
    ``max_delay_s`` above 0 does a batch wait for more requests: no longer than that from the moment
    at which it could run, and not once it is full or each route has a request. The queue has no
    timers: its caller asks again.
    Rule 2: a batch begins with the request that has waited longest, and takes further ones of its
    group in arrival order, up to ``max_rows``; it stops at the first that does not fit.
    Rule 3: a batch holds at most one request of a route, and no request overtakes an earlier one of
    its route.

    A request with more than ``max_rows`` rows is a batch by itself: requests are not split.
    """

    def __init__(self, *, max_rows: int, max_delay_s: float = 0.0) -> None:
        self._max_rows = max_rows
        self._max_delay_ns = round(max_delay_s * 1e9)
        self.waiting: dict[PredictionRequest, None] = {}
        """The requests that wait, in the order of their arrival."""
        self.free_since_ns = 0
        """When the last batch ended."""

    def delay_left_s(self, now_ns: int, num_routes: int) -> float:
        """Return for how many seconds the next batch waits for more requests; 0.0: for none.

        ``now_ns`` is by ``time.monotonic_ns``; ``num_routes`` are those that could have a request.
        """
        if not self.waiting:
            return 0.0
        could_run_since_ns = max(next(iter(self.waiting)).arrived_ns, self.free_since_ns)
        left_ns = could_run_since_ns + self._max_delay_ns - now_ns
        if left_ns <= 0:
            return 0.0
        _, num_rows, routes = self._gather()
        return left_ns * 1e-9 if num_rows < self._max_rows and len(routes) < num_routes else 0.0

    def next_batch(self, now_ns: int, num_routes: int = 0) -> list[PredictionRequest]:
        """Take the batch to run now, while the policy is free.

        It is empty when no request waits, or the batch waits for more.
        """
        if not self.waiting or (self._max_delay_ns and self.delay_left_s(now_ns, num_routes)):
            return []
        batch, _, _ = self._gather()
        for request in batch:
            del self.waiting[request]
        return batch

    def _gather(self) -> tuple[list[PredictionRequest], int, set[str]]:
        """Return the next batch, its rows and those of the one that did not fit, and the routes.

        The routes are those of the requests up to that one.
        """
        queue = iter(self.waiting)
        first = next(queue)
        batch, routes = [first], {first.route.key}
        group, num_rows = first.route.group, len(first.slots)
        for request in queue:
            if request.route.key in routes:
                continue
            # Also for one that is not taken: later requests of its route must not overtake it.
            routes.add(request.route.key)
            if request.route.group != group:
                continue
            num_rows += len(request.slots)
            if num_rows > self._max_rows:
                break
            batch.append(request)
        return batch, num_rows, routes


class Batcher:
    """The policy of one endpoint, for all routes of all sessions.

    It collects the requests of all streams, runs them in batches, and answers them. ``submit``,
    ``predict``, ``cancel``, ``configure`` and both ``forget`` belong to the serving loop.

    Args:
        policy: Called from one thread at a time, but for what its ``PolicyTraits`` allow.
        max_rows: Most rows in a batch that joins several requests.
        max_delay_s: Longest time for which a batch that could run waits for more requests.
        stuck_after_s: See ``PolicyThread``.
        torch_threads: See ``PolicyThread``.
        name: Identifies the server in the answers to predictions.
    """

    def __init__(
        self,
        policy: Policy,
        max_rows: int,
        *,
        max_delay_s: float = 0.0,
        stuck_after_s: float = DEFAULT_STUCK_AFTER_S,
        torch_threads: int = 1,
        name: str = "",
    ) -> None:
        self.num_routes = 0
        """Open routes over all sessions."""
        self.policy_version = 0
        """Version of the policy's present weights; 0: those it was made with."""
        self.sessions = SessionCounters()
        """Counts the sessions, as those who open and end them note it."""
        # The policy's turns count in these: one thread has it at a time.
        self._queue_ns = HistogramCounter(DURATION_BOUNDS_NS)
        self._batch_rows = HistogramCounter(BATCH_BOUNDS_ROWS)
        self._forward_ns = HistogramCounter(DURATION_BOUNDS_NS)
        self._longest_wait_ns = self._busy_ns = self._cancelled = 0
        self._policy = policy
        self._name = name
        traits = traits_of(policy)
        self._is_repeatable = traits.is_repeatable
        self._latency_gate = LatencyGate(only_computes=traits.only_computes)
        self._torch_reason = traits.torch_reason
        self._inbox: list[tuple[Callable[[bytes], None], bytes]] = []
        self._num_new = 0
        """Predictions since the last flush."""
        self._is_collecting = False
        self._is_alone = False
        """Whether no other route could join the request that is taken now."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The serving loop, from the first route on."""
        self._queue = BatchQueue(max_rows=max_rows, max_delay_s=max_delay_s)
        self._timer: asyncio.TimerHandle | None = None
        """Flushes when a batch need not wait for more requests any longer."""
        self._has_delay = max_delay_s > 0
        # The serving loop adds to the queue, the policy's thread takes from it.
        self._lock = threading.Lock()
        self.thread = PolicyThread(
            self._queue.waiting,
            self._run_waiting,
            stuck_after_s=stuck_after_s,
            torch_threads=torch_threads,
        )
        """Runs the policy; all other calls of the policy belong there, too."""
        self._check_thread = self.thread
        if traits.checks_concurrently:
            # One thread for all checks: each may take the memory of a client's largest space.
            self._check_thread = PolicyThread(
                name="rlmesh-ray-policy-checks",
                stuck_after_s=stuck_after_s,
                torch_threads=torch_threads,
            )
        self._accepted: dict[Hashable, None] = {}
        """Environments that the policy need not be asked about again, the newest last."""
        self.horizon = traits.horizon
        """How many actions the policy chooses at once."""
        self.observation_space = traits.observation_space
        """The only space that the policy acts on; None: not known."""

    def statistics(self) -> ModelStatistics:
        """Return the counters. From any thread, as ``facts`` and ``health``."""
        with self._lock:
            waiting = [len(request.slots) for request in self._queue.waiting]
        queue_s = histogram_of(DURATION_BOUNDS_NS, self._queue_ns.read(), NS_PER_S)
        batch_rows = histogram_of(BATCH_BOUNDS_ROWS, self._batch_rows.read())
        inference, reason = "", None
        if self._torch_reason is not None:
            reason = self._torch_reason()
            inference = "compiled" if reason is None else "torch"
        return ModelStatistics(
            items_waiting=len(waiting),
            rows_waiting=sum(waiting),
            is_busy=self.thread.is_busy,
            batches=batch_rows.count,
            items=queue_s.count,
            rows=int(batch_rows.total),
            cancelled=self._cancelled,
            waited_s=queue_s.total,
            longest_wait_s=self._longest_wait_ns / NS_PER_S,
            busy_s=self._busy_ns / NS_PER_S,
            version=__version__,
            uptime_s=self.sessions.uptime_s,
            sessions=self.sessions.sessions(),
            routes=self.num_routes,
            policy_version=self.policy_version,
            errors=dict(self.sessions.errors),
            batch_rows=batch_rows,
            queue_s=queue_s,
            forward_s=histogram_of(DURATION_BOUNDS_NS, self._forward_ns.read(), NS_PER_S),
            inference=inference,
            torch_reason=reason or "",
        )

    def facts(self) -> PolicyFacts:
        traits = traits_of(self._policy)
        observations, actions = (
            () if space is None else tuple(space_lines(space))
            for space in (traits.observation_space, traits.action_space)
        )
        kind = traits.kind or type(self._policy).__name__
        replay = ""
        if self.horizon > 1:
            replay = KEPT if isinstance(self._policy, KeptChunks) else FIRST
        space = traits.observation_space
        images = [] if space is None else image_leaves(space)
        return PolicyFacts(
            kind,
            traits.algorithm,
            self.policy_version,
            observations,
            actions,
            traits.observation_map,
            self.horizon,
            replay,
            {leaf.name: (leaf.shape[-3], leaf.shape[-2]) for leaf in images},
        )

    def health(self) -> Health:
        health = self.thread.health()
        # A check of an environment that hangs keeps new clients waiting, as a batch does.
        return health if not health.is_serving else self._check_thread.health()

    async def configure(self, contract: EnvContract) -> None:
        """Ask whether the policy can act in an environment; if so, count a route from now on.

        It waits for no batch if the policy has accepted such an environment before, or can be
        asked at any time (``PolicyTraits.checks_concurrently``).

        Raises:
            ContractMismatchError: It cannot.
        """
        # What ``Policy.check_contract`` may judge by.
        spaces = contract.observation_space, contract.action_space
        environment = contract.id, *spaces, contract.num_envs
        if environment not in self._accepted:
            check = self._check_thread.submit(self._policy.check_contract, contract)
            await asyncio.wrap_future(check)
            if self._check_thread is self.thread:  # otherwise another check delays no batch
                self._accepted[environment] = None
                while len(self._accepted) > _MAX_ACCEPTED:
                    del self._accepted[next(iter(self._accepted))]
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            limit_torch_threads(self.thread.torch_threads)  # for batches that run in the loop
        self.num_routes += 1

    def forget(self, route_key: str) -> "asyncio.Future[None]":
        """End a route immediately; return a future of the policy's call that frees its state.

        The call runs after the batch that may be running. The future raises the policy's
        RlmeshError, and is cancelled when the batcher is closed before.
        """
        self.num_routes -= 1
        call = self.thread.submit(self._policy.forget, route_key, None, is_grouped=True)
        return asyncio.wrap_future(call)

    async def forget_lanes(self, route_key: str, lanes: Sequence[int]) -> None:
        """Free the policy's state of some lanes of an open route.

        Raises:
            RlmeshError: The policy could not; it may remember some of them.
        """

        def forget() -> None:
            for lane in lanes:
                self._policy.forget(route_key, lane)

        await asyncio.wrap_future(self.thread.submit(forget))

    def set_weights(self, weights: object, *, version: int | None, timeout_s: float | None) -> int:
        """Replace the policy's weights from the next batch on. Blocks; see ModelServer."""
        wanted = None if version is None else checked_version(version)
        if timeout_s is not None:
            require_seconds("timeout_s", timeout_s, allow_zero=True)
            timeout_s = float(timeout_s)  # locks refuse NumPy's smaller floats
        replaced = self.thread.submit(self._replace_weights, weights, wanted)
        try:
            return replaced.result(timeout_s)
        except CancelledError:
            raise EndpointClosedError(
                "the server has been stopped: the weights have not been replaced"
            ) from None
        except TimeoutError:
            if not replaced.cancel():  # it began just now
                return replaced.result()
            raise EndpointTimeoutError(
                f"the policy has not come back for {self.thread.busy_for_s:.0f} s: the weights "
                "have not been replaced"
            ) from None

    def close(self) -> None:
        self.thread.close()
        self._check_thread.close()

    def submit(self, take: Callable[[bytes], None], data: bytes) -> None:
        """Call ``take(data)`` in the next round of the loop, or at once for the only route.

        ``take`` must not raise: the requests of other streams would be lost. Requests that came in
        one round are taken together, from all streams: code that runs ten times in a row is several
        times as fast as code that alternates. And they run in one batch, which costs as much as ten
        rows of a small network.
        """
        self._inbox.append((take, data))
        if self._is_collecting:
            return
        if self.num_routes > 1:
            self._collect_soon()
        else:
            self._is_collecting = True
            self._collect()

    def predict(self, request: PredictionRequest) -> bool:
        """Have actions chosen; return whether the request waits, or has been answered already."""
        request.arrived_ns = time.monotonic_ns()
        self._num_new += 1
        if not self._is_collecting:
            self._collect_soon()
        queue = self._queue
        if (
            self._is_alone
            and self._latency_gate.is_fast
            and not queue.waiting
            and self.thread.begin_inline()
        ):
            # The way through the queue would take as long as the layers of a small network.
            # Requests that the answer leads to are queued: they must not be nested without limit.
            self._is_alone = False
            self._run_inline([request])
            return False
        with self._lock:
            queue.waiting[request] = None
        return True

    def cancel(self, request: PredictionRequest) -> None:
        with self._lock:
            if request in self._queue.waiting:
                del self._queue.waiting[request]
                self._cancelled += 1

    def _replace_weights(self, weights: object, version: int | None) -> int:
        policy, present = self._policy, self.policy_version
        if not isinstance(policy, UpdatablePolicy):
            raise ConfigurationError(
                f"the weights of a {type(policy).__name__} cannot be replaced; serve a torch "
                "module, an RLlib checkpoint, or a policy with get_weights and set_weights"
            )
        newer = version_after(present) if version is None else version
        if newer <= present:
            raise ConfigurationError(
                f"version {newer} is not newer than version {present}, which acts already"
            )
        policy.set_weights(weights)
        self.policy_version = newer
        return newer

    def _collect_soon(self) -> None:
        self._is_collecting = True
        asyncio.get_running_loop().call_soon(self._collect)

    def _collect(self) -> None:
        """Take what has arrived; flush when every route has asked, or nothing more comes."""
        inbox, self._inbox = self._inbox, []
        self._is_alone = self.num_routes <= 1
        for take, data in inbox:
            take(data)
        self._is_alone = False
        if (
            self._latency_gate.is_fast
            and inbox
            and self._num_new < min(self.num_routes, _FULL_ROUND)
        ):
            self._collect_soon()
            return
        self._is_collecting = False
        self._num_new = 0
        if self._queue.waiting:
            self._flush()

    def _flush(self) -> None:
        """Run a batch here, if the policy is fast and free, else in its thread."""
        if self._has_delay:
            with self._lock:
                left_s = self._queue.delay_left_s(time.monotonic_ns(), self.num_routes)
            if left_s:
                if self._timer is None:
                    self._timer = asyncio.get_running_loop().call_later(left_s, self._end_delay)
                return
        if not self._latency_gate.is_fast or not self.thread.begin_inline():
            self.thread.wake()
            return
        with self._lock:
            batch = self._queue.next_batch(time.monotonic_ns(), self.num_routes)
        if batch:
            self._run_inline(batch)
        else:  # the policy's thread has taken the last one
            self.thread.end_inline()
        if self._queue.waiting and not self._is_collecting:  # more than a batch could hold
            self._collect_soon()

    def _end_delay(self) -> None:
        # The batch that has waited may have left, and a later one wait: its delay continues.
        self._timer = None
        if self._queue.waiting:
            self._flush()

    def _run_inline(self, batch: Sequence[PredictionRequest]) -> None:
        # After ``begin_inline``.
        try:
            answers, run = self._run(batch)
        finally:
            self.thread.end_inline()
        self._answer(batch, answers, run)

    def _run_waiting(self) -> bool:
        # In the policy's thread.
        with self._lock:
            batch = self._queue.next_batch(time.monotonic_ns(), self.num_routes)
        if not batch:
            return False
        assert self._loop is not None, "a route is open"
        self._loop.call_soon_threadsafe(self._answer, batch, *self._run(batch))
        return True

    def _answer(
        self,
        batch: Sequence[PredictionRequest],
        answers: Sequence[Actions | RlmeshError],
        run: BatchRun,
    ) -> None:
        for request, answer in zip(batch, answers, strict=True):
            request.answer(request, answer, run)
        # The delay of the next batch begins when the policy is free.
        if self._has_delay and self._queue.waiting and not self._is_collecting:
            self._collect_soon()

    def _run(
        self, batch: Sequence[PredictionRequest]
    ) -> tuple[Sequence[Actions | RlmeshError], BatchRun]:
        begun_ns, num_rows = time.monotonic_ns(), 0
        for request in batch:
            request.queue_ns = waited_ns = begun_ns - request.arrived_ns
            self._queue_ns.add(waited_ns)
            self._longest_wait_ns = max(self._longest_wait_ns, waited_ns)
            num_rows += len(request.slots)
        self._batch_rows.add(num_rows)
        run = BatchRun(self.policy_version, num_rows, 0, self._name)
        answers = run_batch(self._policy, batch, run, is_repeatable=self._is_repeatable)
        self._forward_ns.add(run.forward_ns)
        self._queue.free_since_ns = time.monotonic_ns()
        took_ns = self._queue.free_since_ns - begun_ns
        self._busy_ns += took_ns
        self._latency_gate.note(took_ns * 1e-9)
        return answers, run
